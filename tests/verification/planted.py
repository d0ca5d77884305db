"""Random gradients of a small GPT's shape, summed with weights that are known."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Gradient = dict[str, Tensor]

SHAPES: dict[str, tuple[int, ...]] = {
    "wte": (40, 16),
    "wpe": (32, 16),
    "ln.weight": (16,),
    "ln.bias": (16,),
    "attn.weight": (16, 48),
    "attn.bias": (48,),
    "attn_proj.weight": (16, 16),
    "attn_proj.bias": (16,),
    "mlp.weight": (16, 64),
    "mlp.bias": (64,),
    "mlp_proj.weight": (64, 16),
    "mlp_proj.bias": (16,),
}
"""Biases have no more elements than there may be micro-batches."""


def gradients(count: int, *, seed: int = 0, apart: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Gradient]:
    """``count`` gradients: something in common, and something of its own times ``apart``.

    The condition number is about sqrt(count) / apart for small ``apart``. Tensors differ in size by two decades.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(scale: float) -> Gradient:
        sizes = {name: 10.0 ** -(i % 3) for i, name in enumerate(SHAPES)}
        draw = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
        return {name: scale * sizes[name] * values for name, values in draw.items()}

    common = random(1.0)
    return [{n: (common[n] + own).to(dtype) for n, own in random(apart).items()} for _ in range(count)]


def weighted_sum(weights: Sequence[float], columns: Sequence[Gradient], dtype: torch.dtype = torch.float32) -> Gradient:
    """sum_i w_i g_i as an engine accumulates it: one after the other, rounded to ``dtype`` each time."""
    total = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in columns[0].items()}
    for weight, column in zip(weights, columns, strict=True):
        total = {name: total[name] + weight * column[name].to(dtype) for name in total}
    return total


def norm(gradient: Gradient) -> float:
    """Over all tensors, in float64."""
    return float(torch.cat([tensor.double().flatten() for tensor in gradient.values()]).norm())
