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

from dsaccum.watch.z_loss import ZReading, read_z

CHUNK = 1 << 23
"""Numbers of logits at a time."""
FP32 = 2.0**-24


@dataclass(frozen=True)
class Fitted:
    """Every token of a forward, and how well it accounts for its gradient.

    Attributes:
        weights: s, 0 where there is no cross entropy; float64 [tokens].
        targets: y.
        remainder: largest of all.
        tolerance: for s, relative.
        kind: of loss.
        z: of the z-loss in it.
        broken: why this is no cross entropy.
    """

    weights: Tensor
    targets: Tensor
    remainder: float
    tolerance: float
    kind: str
    z: ZReading
    broken: str | None = None


@dataclass(frozen=True)
class _Rows:
    """Some tokens: s, y, what is left over, (a - s) / s with its rounding, and log sum exp of the logits."""

    s: Tensor
    y: Tensor
    left: Tensor
    excess: Tensor
    noise: Tensor
    log_sums: Tensor
    kinds: set[str]


def fit_tokens(z: Tensor, g: Tensor) -> Fitted:
    """Every row's s and y."""
    size = max(1, CHUNK // z.shape[1])
    roundoff = torch.finfo(g.dtype).eps / 2
    found, largest = [], 0.0
    for start in range(0, z.shape[0], size):
        rows_z, rows_g = z[start : start + size].double(), g[start : start + size].double()
        largest = max(largest, float(rows_z.abs().max()))
        found.append(_rows(rows_z, rows_g, roundoff + (largest + 8) * FP32))
    weights = torch.cat([each.s for each in found]).cpu()
    tolerance = roundoff + (largest + 8) * FP32
    remainder = max((float(each.left.max()) for each in found), default=0.0)
    broken = None
    if not torch.isfinite(weights).all():
        broken = "the gradient at the logits is not finite"
    elif not remainder <= 4 * tolerance:
        broken = "the loss isn't a plain cross entropy of this module's output"
    kinds = set().union(*(each.kinds for each in found))
    kind = "+".join(["cross-entropy", *sorted(kinds)])
    targets = torch.cat([each.y for each in found]).cpu()
    return Fitted(weights, targets, remainder, tolerance, kind, _z(found, weights != 0), broken)


def _z(found: list[_Rows], has_target: Tensor) -> ZReading:
    excess, noise, log_sums = (
        torch.cat([getattr(each, name) for each in found]).cpu()[has_target] for name in ("excess", "noise", "log_sums")
    )
    return read_z(excess, noise, log_sums)


def _rows(z: Tensor, g: Tensor, limit: float) -> _Rows:
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
    excess, noise = torch.zeros_like(s), torch.full_like(s, 4 * limit)
    kinds: set[str] = set()
    if bool((left > 4 * limit).any()):
        general = _general(p, g, y, rows, size, limit)
        if float(general[1].max()) < float(left.max()):
            s, left, excess, noise, kinds = general
    none = size == 0
    s, left = torch.where(none, 0.0, s), torch.where(none, 0.0, left)
    return _Rows(s, y, left, excess, noise, torch.logsumexp(z, dim=-1), kinds)


def _general(
    p: Tensor, g: Tensor, y: Tensor, rows: Tensor, size: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, set[str]]:
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
    s = b + c * vocabulary
    # What rounding does to a, where p hardly differs from word to word; s has a's error by way of c.
    wobble = 2 * limit * (size / dp.norm(dim=-1).clamp(min=1e-300) + a.abs())
    s = torch.where((s.abs() <= 8 * wobble) & (wobble < a.abs() / 16), 0.0, s)  # z-loss where there is no target
    used = (size > 0) & (s != 0)
    per = torch.where(used, s, 1.0)
    excess = torch.where(used, a / per - 1, 0.0)
    # Smoothing takes from b what it gives to c, so that a = s; z-loss adds to a. Where less is left, it is neither.
    left = torch.maximum(left, (-excess).clamp(min=0))
    kinds = set()
    if bool((c[used] * vocabulary > 1e-3 * s[used].abs()).any()):
        kinds.add("label-smoothing")
    if bool((excess > 1e-3).any()):
        kinds.add("z-loss")
    return s, left, excess, torch.where(used, wobble / per.abs(), 0.0), kinds
