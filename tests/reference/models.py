"""Small models, windows and losses for the reference's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 23, 10


def gpt(**changes: Any) -> nn.Module:
    torch.manual_seed(1)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2, **changes}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=1, eos_token_id=1)).train()


def llama() -> nn.Module:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=LENGTH, use_cache=False,
        )
    ).train()  # fmt: skip


def token_window(rows: int, *, ragged: bool, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens. ``ragged``: 1 to 10 real tokens a row, a masked prompt, and rows 0 and 1 without any target."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (rows, LENGTH), generator=random)
    labels, mask = ids.clone(), torch.ones_like(ids)
    if ragged:
        lengths = torch.randint(1, LENGTH + 1, (rows, 1), generator=random)
        prompts = (torch.rand((rows, 1), generator=random) * (lengths - 1)).long()
        position = torch.arange(LENGTH).expand(rows, LENGTH)
        mask = (position < lengths).long()
        labels[(position >= lengths) | (position < prompts)] = -100
        labels[:2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class OneWeight(nn.Module):
    """Predicts ``w * x``."""

    def __init__(self, weight: float = 3.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class PlainSum:
    """Sum of the outputs where the label is 1, so that the gradient of ``OneWeight`` is a sum of inputs."""

    def count(self, micro_batch: Any) -> int:
        return int((micro_batch["labels"] == 1).sum())

    def sum(self, outputs: Any, micro_batch: Any) -> Tensor:
        return outputs[micro_batch["labels"] == 1].sum()
