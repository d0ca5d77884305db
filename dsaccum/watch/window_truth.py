"""The gradient that a watched window was due to give, and how far rounding may take an honest one from it.

In the terms of ``verify``, whose checks then compare: a window's columns are its micro-batches' own gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsaccum.verification.comparison.rounding import Rounding, accumulated, rounding_noise
from dsaccum.verification.comparison.truth import DTYPES, WindowTruth
from dsaccum.watch.window import Vectors

Matrix = list[list[float]]


@dataclass(frozen=True)
class WatchedBatch:
    """N and W, as run."""

    accumulation_steps: int
    world_size: int


@dataclass(frozen=True)
class WatchedCase:
    """What the checks of ``verify`` ask of a case."""

    precision: str
    accumulation_dtype: str
    communication_dtype: str
    batch: WatchedBatch
    gradient_clipping: float
    loop: str = "dsaccum"


def window_truth(
    case: WatchedCase, columns: list[Vectors], exact: list[Vectors], due: Matrix, targets: list[list[int]]
) -> WindowTruth:
    """What was due, and rounding's part.

    Args:
        case: formats, N and W.
        columns: each micro-batch's gradient in the run's own precision, N W of them, rank by rank in each micro-step.
        exact: the same in float64.
        due: their weights, [N][W].
        targets: tokens of each, [N][W].
    """
    flat = [weight for row in due for weight in row]
    world = case.batch.world_size
    forward = DTYPES[case.precision.removeprefix("autocast ")]
    own = torch.float32 if "autocast" in case.precision else forward
    formats = Rounding(own, DTYPES[case.accumulation_dtype], DTYPES[case.communication_dtype])
    gradient = _sum(exact, flat)
    yardstick = accumulated(columns, flat, world, DTYPES[case.accumulation_dtype])
    yardstick = {name: tensor.to(formats.communicated).double() for name, tensor in yardstick.items()}
    sizes = {
        name: sum(w * float(column[name].norm()) for w, column in zip(flat, columns, strict=True)) for name in gradient
    }
    return WindowTruth(
        targets=targets,
        due=due,
        loss=0.0,
        big_batch_loss=0.0,
        gradient=gradient,
        columns=columns,
        yardsticks=(yardstick,),
        rounding=rounding_noise(columns, flat, world, formats),
        sizes=sizes,
        noise=0.0,
    )


def _sum(columns: list[Vectors], weights: list[float]) -> dict[str, Tensor]:
    return {
        name: sum((w * column[name] for w, column in zip(weights, columns, strict=True)), torch.zeros(()).double())
        for name in columns[0]
    }
