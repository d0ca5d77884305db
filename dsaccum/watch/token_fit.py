"""The weight of every target token, read off the gradient that reaches the logits.

The gradient of s (-log softmax(z)[y]) is g = s (p - e_y), with p = softmax(z): it says both y (its one negative entry)
and s, whatever the script, the trainer or the engine divided by. Over all entries but y, where 1 - p may cancel,

    s = <g, p> / <p, p>,    remainder = ||g - s p|| / ||g||

Rounding g to a format of unit roundoff u moves s by u s at the most; so does p's own error of (|z|max + 8) u_fp32, as
softmax runs in float32. What has a larger remainder is tried as cross entropy with label smoothing and z-loss,

    g = a p - b e_y - c 1:    smoothing gives c > 0, and s = b + c V;    z-loss gives a > s

and is otherwise no cross entropy; then nothing is told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 23
"""Numbers of logits at a time."""
FP32 = 2.0**-24


@dataclass(frozen=True)
class Fitted:
    """Every token of a forward: its weight s and target y, and how well they account for its gradient."""

    weights: Tensor
    targets: Tensor
    remainder: float
    tolerance: float
    kind: str
    broken: str | None = None


def fit_tokens(z: Tensor, g: Tensor) -> Fitted:
    """Every row's s and y; float64 and int64 [tokens], s = 0 where there is no gradient."""
    size = max(1, CHUNK // z.shape[1])
    roundoff = torch.finfo(g.dtype).eps / 2
    weights, targets, remainders, largest = [], [], [], 0.0
    kinds: set[str] = set()
    for start in range(0, z.shape[0], size):
        rows_z, rows_g = z[start : start + size].double(), g[start : start + size].double()
        largest = max(largest, float(rows_z.abs().max()))
        limit = roundoff + (largest + 8) * FP32
        s, y, left, more = _rows(rows_z, rows_g, 4 * limit)
        weights.append(s)
        targets.append(y)
        remainders.append(left)
        kinds |= more
    tolerance = roundoff + (largest + 8) * FP32
    remainder = float(torch.cat(remainders).max()) if remainders else 0.0
    broken = None
    if not torch.isfinite(torch.cat(weights)).all():
        broken = "the gradient at the logits is not finite"
    elif remainder > 4 * tolerance:
        broken = f"the loss is no plain cross entropy of the logits: {remainder:.1e} of a token's gradient is left over"
    kind = "+".join(["cross-entropy", *sorted(kinds)])
    return Fitted(torch.cat(weights).cpu(), torch.cat(targets).cpu(), remainder, tolerance, kind, broken)


def _rows(z: Tensor, g: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor, set[str]]:
    p = torch.softmax(z, dim=-1)
    y = g.argmin(dim=-1)
    rows = torch.arange(len(y), device=y.device)
    others = p.clone()
    others[rows, y] = 0
    rest = g.clone()
    rest[rows, y] = 0
    size = rest.norm(dim=-1)
    s = (rest * others).sum(dim=-1) / (others * others).sum(dim=-1).clamp(min=1e-300)
    left = (rest - s[:, None] * others).norm(dim=-1) / size.clamp(min=1e-300)
    at_target = s * p[rows, y] - g[rows, y]  # s, too, if nothing but cross entropy pulls at the logits
    left = torch.maximum(left, (at_target / torch.where(size == 0, 1.0, s) - 1).abs())
    kinds: set[str] = set()
    if bool((left > limit).any()):
        s2, left2, kinds2 = _general(p, g, y, rows, size)
        if float(left2.max()) < float(left.max()):
            s, left, kinds = s2, left2, kinds2
    none = size == 0
    return torch.where(none, 0.0, s), y, torch.where(none, 0.0, left), kinds


def _general(p: Tensor, g: Tensor, y: Tensor, rows: Tensor, size: Tensor) -> tuple[Tensor, Tensor, set[str]]:
    """Fit g = a p - b e_y - c 1: a and c by least squares over all but y, b from y."""
    vocabulary = p.shape[-1]
    others = torch.ones_like(p)
    others[rows, y] = 0
    count = vocabulary - 1
    mean_p, mean_g = (p * others).sum(-1) / count, (g * others).sum(-1) / count
    dp, dg = (p - mean_p[:, None]) * others, (g - mean_g[:, None]) * others
    a = (dp * dg).sum(-1) / (dp * dp).sum(-1).clamp(min=1e-300)
    c = a * mean_p - mean_g
    b = a * p[rows, y] - c - g[rows, y]
    model = a[:, None] * p - c[:, None]
    model[rows, y] -= b
    left = (g - model).norm(dim=-1) / size.clamp(min=1e-300)
    used = size > 0
    s = b + c * vocabulary
    # Smoothing takes from b what it gives to c, so that a = s; z-loss adds to a. Where less is left, it is neither.
    less = torch.where(used, 1 - a / torch.where(used, s, 1.0), 0.0)
    left = torch.maximum(left, less.clamp(min=0))
    kinds = set()
    if bool((c[used] * vocabulary > 1e-3 * s[used].abs()).any()):
        kinds.add("label-smoothing")
    if bool((a[used] > s[used] * (1 + 1e-3)).any()):
        kinds.add("z-loss")
    return s, left, kinds
