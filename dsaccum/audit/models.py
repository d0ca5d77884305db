"""Models whose parameters are not all trained by every micro-batch; ``model.factory`` names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

SIZES: Final = {"n_layer": 2, "n_embd": 32, "n_head": 2}


def reference_to(function: Any) -> str:
    """``FILE.py:function``, as an experiment names it."""
    return f"{Path(__file__).resolve()}:{function.__name__}"


def frozen(vocabulary_size: int, sequence_length: int) -> nn.Module:
    """Its first block and its positions are frozen, as in fine-tuning."""
    model = _gpt2(vocabulary_size, sequence_length)
    for module in (model.transformer.wpe, model.transformer.h[0]):
        module.requires_grad_(False)
    return model


def unused(vocabulary_size: int, sequence_length: int) -> nn.Module:
    """It holds a trained parameter that no forward uses, as a head that waits for its task."""
    model = _gpt2(vocabulary_size, sequence_length)
    model.register_parameter("waiting", nn.Parameter(torch.ones(64)))
    return model


def _gpt2(vocabulary_size: int, sequence_length: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": vocabulary_size, "n_positions": sequence_length, "use_cache": False}
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ids = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**SIZES, **sizes, **without_dropout, **ids))
