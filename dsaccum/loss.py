"""The loss as a sum over target tokens and its normaliser, so that the window's mean can be formed exactly.

The gradient wanted is that of the mean over all T target tokens of a window, on all W ranks and in all N micro-steps:

    L = (1 / T) * sum_{r,k} S_rk        S_rk = token-loss sum of rank r's micro-batch k

The engine divides each loss by N and averages over the W ranks, so micro-batch (r, k) must be fed

    S_rk * N * W / T = S_rk / d         d = T / (N * W), the mean target count of a micro-batch

With equal counts d is each micro-batch's own count n and this is the usual mean; with ragged counts only this is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dsaccum.config.errors import ConfigError
from dsaccum.config.factories import load_factory
from dsaccum.data.samples import NOT_A_TARGET


class SummedLoss(Protocol):
    """A loss that is a sum over a micro-batch and a count to divide by; what ``loss.factory`` returns."""

    def count(self, micro_batch: Mapping[str, Tensor]) -> int:
        """What ``sum`` is to be divided by, known from the data alone (for language models: target tokens)."""

    def sum(self, outputs: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
        """The micro-batch's summed loss, a scalar with a graph; ``outputs`` is what the model's forward returned."""


class CausalLMLoss:
    """Cross entropy of the next token, summed over target tokens in float32."""

    def count(self, micro_batch: Mapping[str, Tensor]) -> int:
        """Target tokens: labels that count *after* the causal shift; each row's first label predicts nothing."""
        return int((micro_batch["labels"][:, 1:] != NOT_A_TARGET).sum())

    def sum(self, outputs: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
        """Sum of token losses; ``outputs.logits`` [B, T, V], ``micro_batch["labels"]`` [B, T]."""
        logits = outputs.logits
        # The labels are shifted, not the logits: slicing [B, T, V] would copy the largest tensor of the step.
        targets = F.pad(micro_batch["labels"], (0, 1), value=NOT_A_TARGET)[:, 1:]
        return F.cross_entropy(
            logits.float().view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=NOT_A_TARGET, reduction="sum"
        )


def build_loss(factory: str | None, *, source: str | Path) -> SummedLoss:
    """The experiment's loss: causal-LM cross entropy, or what ``loss.factory`` returns.

    Raises:
        ConfigError: the factory cannot be imported or returns something without ``count`` and ``sum``.
    """
    if factory is None:
        return CausalLMLoss()
    try:
        loss = load_factory(factory, source=source, key="loss.factory")()
    except ConfigError:
        raise
    except Exception as error:
        problem = f"the function raised {type(error).__name__}: {error}"
        raise ConfigError(problem, source=source, key="loss.factory", value=factory) from error
    missing = [name for name in ("count", "sum") if not callable(getattr(loss, name, None))]
    if missing:
        problem = f"it returned {type(loss).__name__}, which has no method {' and no '.join(missing)}"
        allowed = "an object with count(micro_batch) and sum(outputs, micro_batch)"
        raise ConfigError(problem, source=source, key="loss.factory", value=factory, allowed=allowed)
    return loss


def engine_divisor(window_targets: float, accumulation_steps: int, world_size: int) -> float:
    """D = T / (N W): what a micro-batch's loss sum is divided by before the engine divides by N and averages over W.

    Args:
        window_targets: T, target tokens of the whole window on all ranks; a window without any has gradient zero.
    """
    return max(window_targets, 1.0) / (accumulation_steps * world_size)


def model_inputs(micro_batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the forward gets: everything but the labels, so that no model computes a loss of its own."""
    return {name: tensor for name, tensor in micro_batch.items() if name != "labels"}


def model_adds_loss(model: torch.nn.Module, vocabulary_size: int, sequence_length: int) -> bool:
    """Whether the model's own loss is more than causal-LM cross entropy, e.g. a router's auxiliary loss.

    A probe of two short rows of random tokens, in evaluation mode. A forward that takes no ``labels`` adds nothing.
    """
    device = next(model.parameters()).device
    shape = (2, min(16, sequence_length))
    tokens = torch.randint(vocabulary_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(input_ids=tokens, labels=tokens)
    except TypeError:
        return False
    finally:
        model.train(was_training)
    own = getattr(outputs, "loss", None)
    if own is None:
        return False
    loss, batch = CausalLMLoss(), {"labels": tokens}
    ours = loss.sum(outputs, batch) / loss.count(batch)
    # Both are float32 means of the same few numbers, each exact to 2**-24; an auxiliary loss is larger by far.
    return not torch.isclose(own.float(), ours, rtol=1e-5, atol=1e-6).item()
