"""A look at the model before anything is trained: does it see the future, and does it add a loss of its own?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsaccum.config.errors import ConfigError
from dsaccum.loss import CausalLMLoss

LONGEST = 16
"""Tokens of a probe's rows: enough to tell, and no work even for a large model."""


@torch.no_grad()
def check_causal_language_model(
    model: nn.Module, vocabulary_size: int, sequence_length: int, source: str | Path
) -> None:
    """Refuse a model that plain next-token cross entropy does not train; two forwards of a few tokens on the CPU.

    Raises:
        ConfigError: the forward fails, has no logits, sees later tokens, or adds a loss (a router's, for instance).
    """
    was_training = model.training
    model.eval()
    try:
        shape = (2, min(LONGEST, sequence_length))
        tokens = torch.randint(vocabulary_size, shape, generator=torch.Generator().manual_seed(0))
        logits = _logits(model, tokens, source)
        _refuse_leak(model, tokens, logits, vocabulary_size, source)
        _refuse_added_loss(model, tokens, source)
    finally:
        model.train(was_training)


def _logits(model: nn.Module, tokens: Tensor, source: str | Path) -> Tensor:
    try:
        logits = model(input_ids=tokens).logits
        if logits.shape[:2] == tokens.shape:
            return logits
        problem = f"its logits have shape {tuple(logits.shape)} for tokens of shape {tuple(tokens.shape)}"
    except Exception as error:
        reason = " ".join(str(error).split())
        problem = f"its forward fails on {tuple(tokens.shape)} tokens ({type(error).__name__}: {reason})"
    allowed = "a causal language model: model(input_ids=...).logits of shape [rows, tokens, vocabulary]"
    raise ConfigError(problem, source=source, key="model", allowed=allowed, fix="mend the model, or write loss.factory")


def _refuse_leak(model: nn.Module, tokens: Tensor, logits: Tensor, vocabulary_size: int, source: str | Path) -> None:
    """With another last token, all earlier logits must be the same, up to the order of float32 sums."""
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % vocabulary_size
    difference = (model(input_ids=changed).logits - logits)[:, :-1].abs().max() if tokens.size(1) > 1 else 0.0
    # An honest difference is a few roundings, 2**-24 each; what looks ahead was measured at 1e-4 and more, untrained.
    if float(difference) > 1e-5 * float(logits.abs().max()):
        raise ConfigError(
            "the model sees the tokens that it should predict: its logits change with a later token",
            source=source,
            key="model",
            allowed="causal language models",
            fix="for encoders such as BERT, model.config: {is_decoder: true}",
        )


def _refuse_added_loss(model: nn.Module, tokens: Tensor, source: str | Path) -> None:
    try:
        outputs: Any = model(input_ids=tokens, labels=tokens)
    except Exception:  # it takes no labels, so it has no loss to add
        return
    own = getattr(outputs, "loss", None)
    if not isinstance(own, Tensor) or own.numel() != 1:
        return
    loss, batch = CausalLMLoss(), {"labels": tokens}
    ours = loss.sum(outputs, batch) / loss.count(batch)
    # Both are float32 means of the same few numbers, each exact to 2**-24; an auxiliary loss is larger by far.
    if not torch.isclose(own.float().reshape(()), ours, rtol=1e-5, atol=1e-6):
        raise ConfigError(
            "the model's forward adds a loss of its own to the cross entropy (a router's auxiliary loss?)",
            source=source,
            key="loss.factory",
            allowed="FILE.py:function that states the whole loss",
            fix="switch it off in model.config (output_router_logits: false), or write loss.factory",
        )
