"""The loss as a sum over target tokens and its normaliser, so that the window's mean can be formed exactly.

The gradient wanted is that of the mean over all T target tokens of a window, on all W ranks and in all N micro-steps:

    L = (1 / T) * sum_{r,k} S_rk        S_rk = token-loss sum of rank r's micro-batch k

The engine divides each loss by N and averages over the W ranks, so micro-batch (r, k) must be fed

    S_rk * N * W / T = S_rk / d         d = T / (N * W), the mean target count of a micro-batch

With equal counts d is each micro-batch's own count n and this is the usual mean; with ragged counts only this is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dsaccum.allocator import is_out_of_memory
from dsaccum.config.errors import ConfigError
from dsaccum.config.factories import call_factory, place_of
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
    loss = call_factory(factory, source=source, key="loss.factory")
    missing = [name for name in ("count", "sum") if not callable(getattr(loss, name, None))]
    if missing:
        problem = f"it returned {type(loss).__name__}, which has no method {' and no '.join(missing)}"
        allowed = "an object with count(micro_batch) and sum(outputs, micro_batch)"
        raise ConfigError(problem, source=source, key="loss.factory", value=factory, allowed=allowed)
    return _CheckedLoss(loss, factory, source)


class _CheckedLoss:
    """A loss of the user's, held to what ``SummedLoss`` promises each time it is asked.

    Raises:
        ConfigError: ``count`` or ``sum`` returned something else, or raised.
    """

    def __init__(self, loss: SummedLoss, factory: str, source: str | Path) -> None:
        self._loss, self._factory, self._source = loss, factory, source

    def count(self, micro_batch: Mapping[str, Tensor]) -> int:
        count = self._call("count", micro_batch)
        try:
            whole = int(count)
        except (TypeError, ValueError, OverflowError):
            whole = -1
        if whole < 0 or whole != count:
            raise self._mistake(f"count returned {_shown(count)}", "a whole number of at least 0")
        return whole

    def sum(self, outputs: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
        loss = self._call("sum", outputs, micro_batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise self._mistake(f"sum returned {_shown(loss)}", "a scalar tensor")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise self._mistake("sum returned a loss without a graph", "a scalar tensor that backward can start from")
        return loss

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._loss, method)(*arguments)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            problem = f"{method} raised {type(error).__name__}: {error}{place_of(error)}"
            raise ConfigError(problem, source=self._source, key="loss.factory", value=self._factory) from error

    def _mistake(self, problem: str, allowed: str) -> ConfigError:
        return ConfigError(problem, source=self._source, key="loss.factory", value=self._factory, allowed=allowed)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of shape {list(value.shape)}"
    return repr(value.item() if isinstance(value, Tensor) else value)


def window_count(loss: SummedLoss, micro_batches: Iterable[Mapping[str, Tensor]]) -> int:
    """What this rank's part of a window is divided by."""
    return sum(loss.count(micro_batch) for micro_batch in micro_batches)


def engine_divisor(window_targets: int, accumulation_steps: int, world_size: int) -> float:
    """D = T / (N W): what a micro-batch's loss sum is divided by before the engine divides by N and averages over W.

    Args:
        window_targets: T, target tokens of the whole window on all ranks. Without any, d is infinite: gradient zero.
    """
    return window_targets / (accumulation_steps * world_size) if window_targets else math.inf


def model_inputs(micro_batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the forward gets: everything but the labels, so that no model computes a loss of its own."""
    return {name: tensor for name, tensor in micro_batch.items() if name != "labels"}
