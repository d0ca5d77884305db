"""How far rounding alone moves recovered weights: the accumulation done again a few times, each time rounded elsewhere.

A factor c in [1, 2) in front of everything and 1 / c behind it changes nothing but where numbers are rounded. With
columns g_i and due weights w_i, one draw is

    sum over ranks of  as_communicated( ... as_accumulated(as_accumulated(c w_1 g_1) + c w_2 g_2) ... ) / c

and its weights are off by (A^T A)^-1 A^T e, e the draw less sum of w_i g_i, and A = [g_1 ... g_p].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DRAWS = 8
"""The largest over so many draws and all micro-batches stands for what one run may be off by."""
Columns = Sequence[dict[str, Tensor]]


@dataclass(frozen=True)
class Rounding:
    """The formats of one run: of a micro-batch's gradient, of the accumulator, and of what ranks exchange."""

    gradient: torch.dtype
    accumulated: torch.dtype
    communicated: torch.dtype


@dataclass(frozen=True)
class Noise:
    """What rounding may do.

    Attributes:
        weights: largest |w / due - 1| over draws and micro-batches.
        residual: largest part that no weights account for, over S = sum of w_i ||g_i||.
    """

    weights: float
    residual: float


def rounding_noise(columns: Columns, due: Sequence[float], world_size: int, rounding: Rounding) -> Noise:
    """Draw the accumulation several times.

    Args:
        columns: micro-batch (k, r)'s mean gradient at k W + r, whole tensors by name, float64 or float32.
        due: their weights, [N W].
        world_size: W.
        rounding: the formats of the run.
    """
    names = list(dict.fromkeys(name for column in columns for name in column))
    used = [i for i, weight in enumerate(due) if weight > 0]
    if not used or not names:
        return Noise(0.0, 0.0)
    gram = torch.zeros(len(used), len(used), dtype=torch.float64)
    products = torch.zeros(len(used), DRAWS, dtype=torch.float64)
    squares = torch.zeros(DRAWS, dtype=torch.float64)
    factors = 1 + torch.rand(DRAWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name in names:
        matrix = torch.stack([_column(columns[i], name, columns) for i in used])  # [p, elements]
        weights = torch.tensor([due[i] for i in used], dtype=torch.float64)
        exact = weights @ matrix
        errors = torch.stack(
            [_draw(matrix, weights, [i % world_size for i in used], float(c), rounding) - exact for c in factors]
        )
        gram += matrix @ matrix.T
        products += matrix @ errors.T
        squares += errors.square().sum(dim=1)
    if not (gram.isfinite().all() and products.isfinite().all()):
        return Noise(0.0, 0.0)  # nothing can be recovered from what isn't finite, and nothing is excused by it
    off = torch.linalg.lstsq(gram, products).solution  # [p, draws]
    left = (squares - (products * off).sum(dim=0)).clamp(min=0).sqrt()
    norms = gram.diagonal().sqrt()
    size = float((weights * norms).sum())
    relative = (off / weights[:, None]).abs()
    return Noise(float(relative.max()), float(left.max()) / size if size else math.inf)


def accumulated(columns: Columns, due: Sequence[float], world_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The due sum of whole columns, each rank's share added up in ``dtype``, then averaged; flat, float64, by name.

    A rank holds W times what is due, and averaging divides by W: where numbers are rounded, that matters.
    """
    total: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for column in columns for name in column):
        for rank in range(world_size):
            buffer = torch.zeros_like(_column(columns[0], name, columns), dtype=dtype)
            for column, weight in zip(columns[rank::world_size], due[rank::world_size], strict=True):
                buffer = (buffer.double() + world_size * weight * _column(column, name, columns)).to(dtype)
            total[name] = total.get(name, torch.zeros_like(buffer, dtype=torch.float64)) + buffer.double() / world_size
    return total


def exchanged(
    columns: Columns, due: Sequence[float], world_size: int, dtype: torch.dtype, *, each: bool
) -> dict[str, torch.Tensor]:
    """The due sum, rounded to ``dtype`` on its way to the other ranks only; flat, float64, by name.

    Args:
        columns: whole ones.
        due: their weights.
        world_size: W.
        dtype: that gradients are rounded to.
        each: each micro-batch's gradient, as where ranks are averaged at every micro-step; else each rank's sum.
    """
    total: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for column in columns for name in column):
        zeros = torch.zeros_like(_column(columns[0], name, columns))
        total[name] = zeros
        for rank in range(world_size):
            own = zip(columns[rank::world_size], due[rank::world_size], strict=True)
            terms = [(world_size * weight * _column(column, name, columns)).float() for column, weight in own]
            parts = terms if each else [sum(terms[1:], terms[0])]
            total[name] = total[name] + sum((part.to(dtype).double() for part in parts), zeros) / world_size
    return total


def _column(column: dict[str, Tensor], name: str, columns: Columns) -> Tensor:
    if name in column:
        return column[name].double().reshape(-1)
    return torch.zeros_like(next(each[name] for each in columns if name in each), dtype=torch.float64).reshape(-1)


def _draw(matrix: Tensor, weights: Tensor, ranks: list[int], factor: float, rounding: Rounding) -> Tensor:
    """One accumulation, rounded as the run rounds; [elements], float64."""
    total = torch.zeros(matrix.shape[1], dtype=torch.float64)
    for rank in sorted(set(ranks)):
        buffer = torch.zeros(matrix.shape[1], dtype=rounding.accumulated)
        for row, weight, owner in zip(matrix, weights, ranks, strict=True):
            if owner == rank:
                buffer += (factor * weight * row).to(rounding.gradient).to(rounding.accumulated)
        total += buffer.to(rounding.communicated).double()
    return total.to(rounding.communicated).double() / factor
