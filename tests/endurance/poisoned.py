"""For ``loss.factory``: a loss that is NaN for some samples, told by their content, so in every split for the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dsaccum.loss import CausalLMLoss

ONE_IN = 150
"""Samples; so about every tenth window of 16 is discarded."""


class PoisonedLoss(CausalLMLoss):
    """Of the next token, and NaN where the micro-batch holds a poisoned sample."""

    def sum(self, outputs: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
        loss = super().sum(outputs, micro_batch)
        poisoned = bool((micro_batch["input_ids"].sum(dim=1) % ONE_IN == 0).any())
        return loss * float("nan") if poisoned else loss


def loss() -> PoisonedLoss:
    return PoisonedLoss()
