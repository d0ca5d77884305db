"""Causes of a wrong gradient that low precision makes: a scale on one side only, a sum that loses small terms."""

from __future__ import annotations

import math
from typing import Any

import torch

from dsaccum.verification.comparison.evidence import CaseEvidence, StepEvidence
from dsaccum.verification.comparison.rounding import accumulated
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


def low_precision_causes(evidence: CaseEvidence, steps: list[StepEvidence]) -> list[Named]:
    """The due weights explain nearly all, and what they leave over is what adding up in a lower precision loses."""
    ranks, asked = evidence.case.batch.world_size, evidence.case.accumulation_dtype
    if asked != "fp32" or not all(step.judged and _columns_are_whole(step) for step in steps):
        return []
    shown: dict[str, Any] = {}
    for step in steps:
        loss = _left_over(step, ranks, torch.float32)
        if loss > MOST_LOST:
            return []
        unexplained = {name: _left_over(step, ranks, dtype) for name, dtype in LOWER.items()}
        lower = min(unexplained, key=unexplained.__getitem__)
        if unexplained[lower] > EXPLAINED * loss:
            return []
        shown = shown or {"step": step.step, "accumulated_in": lower, "asked": asked, "relative_loss": loss}
    detail = f"in {shown['accumulated_in']}, where {asked} is asked for: off by {shown['relative_loss']:.2g}"
    return [Named(("low-precision-accumulation",), shown, detail)]


def _columns_are_whole(step: StepEvidence) -> bool:
    """Of sketches no sum can be rounded."""
    sizes = {name: tensor.numel() for name, tensor in step.truth.gradient.items()}
    return all(column[name].numel() == size for column in step.truth.columns for name, size in sizes.items())


def _left_over(step: StepEvidence, world_size: int, dtype: torch.dtype) -> float:
    """||G - sum|| / ||sum||, the due weights' sum added up in ``dtype`` on each rank; of rank 0's gradient."""
    found = step.vectors[0]
    due = accumulated(step.truth.columns, step.truth.due_in_order, world_size, dtype)
    difference = math.hypot(*(float((found[name].double() - due[name]).norm()) for name in due))
    size = math.hypot(*(float(tensor.norm()) for tensor in due.values()))
    return difference / size if size else math.inf
