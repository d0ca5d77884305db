"""Causes of a wrong gradient that low precision makes: a scale on one side only, a sum that loses small terms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsaccum.verification.comparison.evidence import CaseEvidence, StepEvidence
from dsaccum.verification.comparison.rounding import accumulated, exchanged
from dsaccum.verification.diagnosis.named import Named

LARGE_SCALE = 256
"""Of loss scales; less could be a product of N and W."""
LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
MOST_LOST = 0.05
"""A sum in bf16 loses 1 % in some dozens of terms."""
EXPLAINED = 0.2
"""What is left over of a loss that is explained: roundings that fall the other way are rare."""


def loss_scale_causes(steps: list[StepEvidence]) -> list[Named]:
    """Every gradient is as small as the loss scale is large; what underflow leaves of it explains no weights."""
    for step in steps:
        scale = step.optimizer_step.loss_scale if step.optimizer_step else 1.0
        ratios = [check.ratio for check in step.judged]
        small = ratios and all(ratio and abs(ratio * scale - 1) < 0.1 for ratio in ratios)
        if scale < LARGE_SCALE or not small:
            return []
    first = steps[0]
    shown = {"step": first.step, "ratio": first.judged[0].ratio, "loss_scale": scale}
    return [Named(("loss-scale-not-applied",), shown, f"step {first.step}: 1/{scale:g} of what is due")]


_IN_COMMUNICATION = "in communication"
_ON_THE_WAY = (
    "look for a cast of gradients where ranks exchange them: a compression hook, a reduction of your own, or "
    "communication_data_type, which the JSON does not set"
)


def low_precision_causes(evidence: CaseEvidence, steps: list[StepEvidence]) -> list[Named]:
    """The due weights explain nearly all, and what they leave over is what a lower precision loses in one place.

    That is where gradients are added up on a rank, or on their way to the other ranks.
    """
    case = evidence.case
    asked = case.accumulation_dtype
    if asked != "fp32" or not all(step.judged and _columns_are_whole(step) for step in steps):
        return []
    places: list[str] = ["in accumulation"]
    if case.batch.world_size > 1 and case.communication_dtype == "fp32":
        places.append(_IN_COMMUNICATION)
    shown: dict[str, Any] = {}
    for step in steps:
        exact = _sums(step, case.batch.world_size, torch.float32, "in accumulation")
        loss = min(_left_over(step, due) for due in exact)
        if not loss <= MOST_LOST:  # nor where it is no number
            return []
        unexplained = {
            (place, name): min(_left_over(step, due) for due in _sums(step, case.batch.world_size, dtype, place))
            for place in places
            for name, dtype in LOWER.items()
        }
        where, lower = least = min(unexplained, key=unexplained.__getitem__)
        if not unexplained[least] <= EXPLAINED * loss or (shown and shown["where"] != where):
            return []
        shown = shown or {
            "step": step.step,
            "where": where,
            "accumulated_in": lower,
            "asked": asked,
            "relative_loss": loss,
        }
    off = f"off by {shown['relative_loss']:.2g}"
    detail = f"{shown['where']} in {shown['accumulated_in']}, where {asked} is asked for: {off}"
    if shown["where"] == _IN_COMMUNICATION:
        return [Named(("low-precision-accumulation",), shown, detail, fix=_ON_THE_WAY)]
    return [Named(("low-precision-accumulation",), shown, detail)]


def _sums(step: StepEvidence, world_size: int, dtype: torch.dtype, place: str) -> Iterator[dict[str, Tensor]]:
    """The due weights' sum in the ways in which it may have been rounded to ``dtype`` there."""
    columns, due = step.truth.columns, step.truth.due_in_order
    if place == _IN_COMMUNICATION:
        for each in (False, True):
            rounded = exchanged(columns, due, world_size, dtype, each=each)
            yield rounded
            yield {name: tensor.to(dtype).double() for name, tensor in rounded.items()}
    else:
        yield accumulated(columns, due, world_size, dtype)


def _columns_are_whole(step: StepEvidence) -> bool:
    """Of sketches no sum can be rounded."""
    sizes = {name: tensor.numel() for name, tensor in step.truth.gradient.items()}
    return all(column[name].numel() == size for column in step.truth.columns for name, size in sizes.items())


def _left_over(step: StepEvidence, due: dict[str, Tensor]) -> float:
    """||G - due|| / ||due|| of rank 0's gradient."""
    found = step.vectors[0]
    difference = math.hypot(*(float((found[name].double() - due[name]).norm()) for name in due))
    size = math.hypot(*(float(tensor.norm()) for tensor in due.values()))
    return difference / size if size else math.inf
