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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 23
"""Numbers of logits at a time."""
FP32 = 2.0**-24


@dataclass(frozen=True)
class TokenReading:
    """One micro-batch's tokens.

    Attributes:
        weights: s of each token that has one and is no padding, [n].
        padding: s of each that predicts padding.
        due: tokens that are due to count: by the labels where the model was given them, else those that have a weight.
        before_shift: labels that count before the causal shift; where they are not known, one more for each row.
        positions: of the batch.
        rows: with a target.
        all_rows: of the batch.
        remainder: the largest part of a token's gradient that is no cross entropy.
        tolerance: what rounding may do to a weight, relative.
        kind: ``cross-entropy``, with ``+label-smoothing``, ``+z-loss``.
        unweighted: due tokens without a weight.
        uncalled: tokens with a weight that no label asks for, padding aside.
        shifted: a label stands one place after its logits.
        misaligned: targets that are not the inputs' next tokens, though most are.
        reason: why nothing was told; then the rest means nothing.
    """

    weights: list[float] = field(default_factory=list)
    padding: list[float] = field(default_factory=list)
    due: int = 0
    before_shift: int = 0
    positions: int = 0
    rows: int = 0
    all_rows: int = 0
    remainder: float = 0.0
    tolerance: float = 0.0
    kind: str = "cross-entropy"
    unweighted: int = 0
    uncalled: int = 0
    shifted: bool = False
    misaligned: int = 0
    reason: str | None = None

    @property
    def sum(self) -> float:
        """Over all tokens, padding included."""
        return sum(self.weights) + sum(self.padding)

    @classmethod
    def together(cls, readings: Sequence[TokenReading]) -> TokenReading | None:
        """Of several forwards in one micro-step."""
        if not readings:
            return None
        if broken := next((each for each in readings if each.reason), None):
            return broken
        first = readings[0]
        if len(readings) == 1:
            return first
        return cls(
            weights=[w for each in readings for w in each.weights],
            padding=[w for each in readings for w in each.padding],
            due=sum(each.due for each in readings),
            before_shift=sum(each.before_shift for each in readings),
            positions=sum(each.positions for each in readings),
            rows=sum(each.rows for each in readings),
            all_rows=sum(each.all_rows for each in readings),
            remainder=max(each.remainder for each in readings),
            tolerance=max(each.tolerance for each in readings),
            kind=first.kind,
            unweighted=sum(each.unweighted for each in readings),
            uncalled=sum(each.uncalled for each in readings),
            shifted=first.shifted,
            misaligned=sum(each.misaligned for each in readings),
        )


def read_tokens(
    logits: Tensor, gradient: Tensor, keywords: Mapping[str, Any], arguments: Sequence[Any]
) -> TokenReading:
    """Read one forward's tokens.

    Args:
        logits: [..., V], as the run had them.
        gradient: that reached them, of the same shape.
        keywords: what the forward was given: ``labels``, ``attention_mask`` and ``input_ids`` are looked at.
        arguments: likewise, by position.
    """
    vocabulary = logits.shape[-1]
    flat_z, flat_g = logits.reshape(-1, vocabulary), gradient.reshape(-1, vocabulary)
    tokens = _fit(flat_z, flat_g)
    shape = logits.shape[:-1]
    if tokens.broken is not None:
        return TokenReading(reason=tokens.broken, remainder=tokens.remainder)
    weights, targets = tokens.weights.reshape(shape), tokens.targets.reshape(shape)
    return _counted(weights, targets, keywords, arguments, tokens)


@dataclass(frozen=True)
class _Fitted:
    weights: Tensor
    targets: Tensor
    remainder: float
    tolerance: float
    kind: str
    broken: str | None = None


def _fit(z: Tensor, g: Tensor) -> _Fitted:
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
    return _Fitted(torch.cat(weights).cpu(), torch.cat(targets).cpu(), remainder, tolerance, kind, broken)


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


def _counted(
    weights: Tensor, targets: Tensor, keywords: Mapping[str, Any], arguments: Sequence[Any], fitted: _Fitted
) -> TokenReading:
    shape = weights.shape
    counts = weights != 0
    labels = _field(keywords.get("labels"), shape)
    inputs = _field(keywords.get("input_ids"), shape)
    if inputs is None:
        inputs = next(
            (f for f in (_field(a, shape) for a in arguments) if f is not None and not f.is_floating_point()), None
        )
    mask = _field(keywords.get("attention_mask"), shape)
    sequences = len(shape) == 2
    shifted = sequences and _is_shifted(labels if labels is not None else inputs, targets, counts)
    padding = torch.zeros(shape, dtype=torch.bool)
    if mask is not None and shifted:
        padding[:, :-1] = mask[:, 1:] == 0
    elif mask is not None and sequences:
        padding = mask == 0
    asked = None
    before = int(counts.sum())
    if labels is not None:
        asked = _moved(labels != -100, shifted) & ~padding
        before = int((labels != -100).sum())
    elif shifted:
        before = int((counts & ~padding).sum()) + int(counts.any(dim=-1).sum())
    real = counts & ~padding
    due = asked if asked is not None else real
    misaligned = 0
    source = labels if labels is not None else inputs
    if source is not None and shifted:
        wanted = torch.full(shape, -100, dtype=source.dtype)
        wanted[:, :-1] = source[:, 1:]
        misaligned = int((real & (wanted != targets)).sum())
    return TokenReading(
        weights=weights[real].tolist(),
        padding=weights[counts & padding].tolist(),
        due=int(due.sum()),
        before_shift=before,
        positions=weights.numel(),
        rows=int(due.any(dim=-1).sum()) if sequences else int(due.sum()),
        all_rows=shape[0] if shape else 1,
        remainder=fitted.remainder,
        tolerance=fitted.tolerance,
        kind=fitted.kind,
        unweighted=int((due & ~counts).sum()),
        uncalled=int((real & ~due).sum()) if asked is not None else 0,
        shifted=bool(shifted),
        misaligned=misaligned,
    )


def _is_shifted(source: Tensor | None, targets: Tensor, counts: Tensor) -> bool:
    """Whether targets are what stands one place later, rather than at their own."""
    if source is None or targets.shape[1] < 2:
        return False
    later = counts[:, :-1]
    at_next = int((later & (source[:, 1:] == targets[:, :-1])).sum())
    own = int((counts & (source == targets)).sum())
    return at_next > own


def _moved(asked: Tensor, shifted: bool) -> Tensor:
    if not shifted:
        return asked
    moved = torch.zeros_like(asked)
    moved[:, :-1] = asked[:, 1:]
    return moved


def _field(value: Any, shape: torch.Size) -> Tensor | None:
    return value.detach().cpu() if isinstance(value, Tensor) and value.shape == shape else None
