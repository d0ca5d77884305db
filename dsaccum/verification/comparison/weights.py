"""The weight that each micro-batch's gradient really got on its way to the optimizer.

The accumulated gradient is G = sum_i w_i g_i, with g_i the gradient of micro-batch i of N micro-steps on W ranks. G and
all g_i are known, so the w_i solve a least-squares problem over all parameters; what lies outside the span of the g_i,
the residual, no weighting explains. If g_i is micro-batch i's mean gradient, n_i / sum_j n_j is due to it.

One parameter whose gradient is lost or doubled bends all weights of plain least squares. Therefore
``recover_robustly`` finds the tensors that disagree with the others, and solves without them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from dsaccum.verification.comparison.factors import Factors
from dsaccum.verification.comparison.least_squares import WORST_CONDITION, Sight, System, quotient

FAINT = 1e-6
"""A tensor whose share of the whole gradient is less is judged on the global scale: it may be zero by mathematics."""
FAR = 10.0
"""Outliers have residuals so many times the largest of the others ..."""
SEEN = 1e-5
"""... and not below this: what is smaller hardly bends a weight, and may be float32's rounding."""
SMALL = 1e-3
"""A tensor whose share is less is looked at on this scale when outliers are sought: it hardly bends a weight."""
FEW = 1 / 3
"""Outliers are no more than this share of the tensors: with many, either side may be the fault."""
MOST_REFITS = 5


@dataclass(frozen=True)
class RecoveredWeights:
    """What least squares says.

    Attributes:
        weights: one for each micro-batch, [p]. None where it can't be told.
        residual: ||G - sum_i w_i g_i|| / S with S = sum_i |w_i| ||g_i||, extra vectors included; infinite where only S
            is 0; None where nothing was solved.
        condition: condition number of the columns, each scaled to norm 1, after merging.
        reason: why there are no weights, where there are none.
        merged: micro-batches whose gradients have the same direction, so that only their joint weight can be told. It
            is shared equally; None where they cancel.
        extra: coefficient of each extra vector, [e]. None where it can't be told.
        outliers: names of the tensors that disagree with the others and were left out.
    """

    weights: list[float | None]
    residual: float | None
    condition: float
    reason: str | None = None
    merged: list[list[int]] = field(default_factory=list)
    extra: list[float | None] = field(default_factory=list)
    outliers: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TensorFit:
    """One tensor of the gradient against what weights predict for it: P_t = sum_i w_i g_i,t.

    Attributes:
        ratio: <G_t, P_t> / <P_t, P_t>: 1 if right, 0 if lost, 2 if doubled. None where ||P_t|| is below 1e-6 S: a
            ratio of rounding errors says nothing.
        residual: ||G_t - P_t|| / S_t with S_t = sum_i |w_i| ||g_i,t||, taken as 1e-6 S at the least. Infinite where
            something isn't finite, or where S is 0 and G_t isn't.
        share: S_t / S, where S = sum_i |w_i| ||g_i|| is that of all tensors together.
    """

    ratio: float | None
    residual: float
    share: float


def recover_weights(factors: Factors) -> RecoveredWeights:
    """Plain least squares over all tensors together."""
    return _recover(factors, range(len(factors.names)))


def recover_per_tensor(factors: Factors) -> dict[str, RecoveredWeights]:
    """Least squares in each tensor by itself.

    None with a reason where a tensor has too few elements, or its columns are below 1e-6 of the whole ones: rounding.
    """
    sizes = factors.triangles[:, :, :-1].nan_to_num().square().sum(dim=(1, 2)).sqrt()
    faint = FAINT * float(sizes.norm())
    recovered = {}
    for t, name in enumerate(factors.names):
        if 0 < float(sizes[t]) < faint:
            recovered[name] = _nothing(factors, f"its gradients are below {FAINT:.0e} of the whole ones")
        else:
            recovered[name] = _recover(factors, [t])
    return recovered


def recover_robustly(factors: Factors) -> RecoveredWeights:
    """Least squares over the tensors that agree; those that stand far outside are ``outliers`` and left out.

    The start is the w that minimises sum_t ||G_t - P_t||, norms not squared. A tensor can move it only if it outweighs
    all others together, each counted by its norm, however far off it is; least squares moves with any.
    """
    everything = range(len(factors.names))
    plain = _recover(factors, everything)
    if plain.reason is not None:
        return plain
    coefficients = System(factors, everything).least_absolute()
    off: list[int] | None = None
    for _ in range(MOST_REFITS):
        previous, off = off, _outliers(factors, Sight(factors, coefficients))
        if off == previous:
            break
        system = System(factors, [t for t in everything if t not in off])
        if _unsolvable(system):
            return plain
        coefficients = system.solve()
    left_out = off or []
    found = _recover(factors, [t for t in everything if t not in left_out])
    return replace(found, outliers=[factors.names[t] for t in left_out])


def judge_tensors(
    factors: Factors, weights: Sequence[float | None], extra: Sequence[float | None] = ()
) -> dict[str, TensorFit]:
    """Every tensor of G against ``weights`` [p], expected or recovered, and ``extra`` [e] if G holds extra vectors.

    None counts as 0.

    Raises:
        ValueError: not one weight for each micro-batch, or not one coefficient for each extra vector.
    """
    if len(weights) != factors.num_columns or len(extra) not in (0, factors.num_extra):
        expected = f"{factors.num_columns} micro-batches and {factors.num_extra} extra vectors"
        raise ValueError(f"{len(weights)} weights and {len(extra)} extra coefficients for {expected}")
    values = [value or 0.0 for value in [*weights, *(extra or [0.0] * factors.num_extra)]]
    sight = Sight(factors, torch.tensor(values, dtype=torch.float64))
    return {name: _fit(sight, t) for t, name in enumerate(factors.names)}


def weight_error(weights: list[float | None], due: list[float]) -> float | None:
    """The largest |w / due - 1| over micro-batches whose weight is known and not due to be 0."""
    errors = [abs(w / d - 1) for w, d in zip(weights, due, strict=True) if w is not None and d > 0]
    return max(errors, default=None)


def _recover(factors: Factors, tensors: Sequence[int]) -> RecoveredWeights:
    if broken := factors.not_finite(tensors):
        return _nothing(factors, broken)
    system = System(factors, tensors)
    merged = [group for group in system.groups if len(group) > 1]
    if reason := _unsolvable(system):
        return replace(_nothing(factors, reason), condition=system.condition, merged=merged)
    coefficients = system.solve()
    sight, told = Sight(factors, coefficients, tensors), system.told(coefficients)
    return RecoveredWeights(
        weights=told[: factors.num_columns],
        residual=quotient(float(sight.left_over.norm()), sight.size),
        condition=system.condition,
        merged=merged,
        extra=told[factors.num_columns :],
    )


def _nothing(factors: Factors, reason: str) -> RecoveredWeights:
    weights: list[float | None] = [None] * factors.num_columns
    return RecoveredWeights(weights, None, math.inf, reason, extra=[None] * factors.num_extra)


def _unsolvable(system: System) -> str | None:
    if not system.groups:
        return "no micro-batch has a gradient"
    if not system.condition <= WORST_CONDITION:
        return f"the micro-batches' gradients are too alike (condition number {system.condition:.1e})"
    return None


def _fit(sight: Sight, t: int) -> TensorFit:
    target, predicted, left_over = sight.targets[t], sight.predicted[t], float(sight.left_over[t])
    square, size = float(predicted @ predicted), float(sight.sizes[t])
    told = math.isfinite(left_over) and math.sqrt(square) > FAINT * sight.size
    return TensorFit(
        ratio=float(target @ predicted) / square if told else None,
        residual=quotient(left_over, max(size, FAINT * sight.size)),
        share=quotient(size, sight.size),
    )


def _outliers(factors: Factors, sight: Sight) -> list[int]:
    """Indices of the tensors above a wide gap in the residuals, in order; none if there is no such gap.

    Those above it must be ``FEW``, and hold less than half of the gradient, counted by norms. Those below it must have
    twice as many elements as there are unknowns, or they would agree with anything.
    """
    residuals = sight.left_over / sight.sizes.clamp(min=SMALL * sight.size or 1.0)
    order = residuals.argsort().tolist()
    weight, elements = 0.0, 0
    for k, (below, above) in enumerate(pairwise(order), start=1):
        weight += float(sight.sizes[below])
        elements += factors.elements[below]
        few = len(order) - k <= FEW * len(order) and weight > float(sight.sizes.sum()) / 2
        overdetermined = elements >= 2 * (factors.num_columns + factors.num_extra)
        if few and overdetermined and residuals[above] > max(SEEN, FAR * float(residuals[below])):
            return sorted(order[k:])
    return []
