"""One window's gradient against the truth: weights of micro-batches, and the error of every parameter tensor.

Bounds are derived, with u the unit roundoff of a format (2^-24 in fp32, 2^-8 in bf16) and m the elements of a tensor:

    error_t     ||G_t - truth_t|| / S_t, S_t = sum of w_i ||g_i,t||, at least 1e-6 of the whole gradient's
    bound_t     2 (1 + 6 / sqrt(2 m)) y_t + 4 u_sums + u_forward + noise, u_sums: of the accumulator, or of what ranks
                exchange, whichever is coarser
                y_t: the yardstick's own error, at least the median tensor's. It is one draw from the rounding that the
                run draws from too; a norm over m elements scatters by 1 / sqrt(2 m), and six times that is allowed.
    weights     2.5 d + (N + W) u_fp32 c + low, d: what the yardsticks' weights, and those of several draws of the same
                accumulation, are off by at the most; c: the condition number
                low: u / 8 where the forward is in low precision; 2 u for a loop of the user's, whose scale of the loss,
                and with it the rounding at the logits, isn't known here
    residual    3 times the yardsticks' and the draws' + 4 u of the forward
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from dsaccum.reference import Gradient
from dsaccum.verification.cases.arguments import LOOPS
from dsaccum.verification.cases.case import Case
from dsaccum.verification.comparison.factors import Factors
from dsaccum.verification.comparison.sketch import GradientSketch
from dsaccum.verification.comparison.truth import DTYPES, WindowTruth
from dsaccum.verification.comparison.weights import (
    RecoveredWeights,
    TensorFit,
    judge_tensors,
    recover_robustly,
    weight_error,
)

FAINT = 1e-6
"""A tensor with less of the whole gradient is judged on the global scale: it may be zero by mathematics."""
FP32 = torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True)
class TensorError:
    """One parameter tensor of the gradient.

    Attributes:
        error: ||G - truth|| / S.
        bound: what rounding may do.
        ratio: of G to what the due weights give; None where that is nothing.
        residual: what the due weights leave over, over S.
    """

    name: str
    error: float
    bound: float
    ratio: float | None
    residual: float

    @property
    def off(self) -> bool:
        """Outside its bound; so is what isn't a number."""
        return not self.error <= self.bound


@dataclass(frozen=True)
class GradientCheck:
    """One rank's gradient of one window.

    Attributes:
        recovered: weights of the micro-batches' mean gradients, in the order of the columns.
        max_error: the largest |w / due - 1|; None where no weight could be told.
        tolerance: for it.
        residual_bound: for ``recovered.residual``.
        tensors: every trained parameter.
        ratio: <G, truth> / <truth, truth>.
        yardstick_error: of the tensor that decides.
        noise: of running twice.
        norm: of G, unscaled.
        factors: the geometry of gradient and columns, from which a diagnosis asks further.
    """

    recovered: RecoveredWeights
    max_error: float | None
    tolerance: float
    residual_bound: float
    tensors: list[TensorError]
    ratio: float | None
    yardstick_error: float
    noise: float
    norm: float
    factors: Factors

    @property
    def worst(self) -> TensorError | None:
        """The tensor that decides: the one furthest outside its bound, or nearest to it."""
        return max(self.tensors, key=lambda t: _excess(t.error, t.bound), default=None)

    @property
    def off(self) -> list[TensorError]:
        """Tensors outside their bounds, the furthest first."""
        return sorted((t for t in self.tensors if t.off), key=lambda t: -_excess(t.error, t.bound))

    @property
    def explained(self) -> bool:
        """Whether some weighting of the micro-batches accounts for the gradient, single tensors aside."""
        residual = self.recovered.residual
        return residual is not None and residual <= self.residual_bound

    @property
    def weights_right(self) -> bool:
        """Not to be answered with True where no weight could be told and the error is out of bounds."""
        return self.max_error is None or self.max_error <= self.tolerance

    @property
    def passed(self) -> bool:
        """Weights and every tensor within bounds."""
        return self.weights_right and not self.off


def check_gradient(
    case: Case,
    truth: WindowTruth,
    sketch: GradientSketch,
    gradient: Mapping[str, Tensor | None],
    *,
    loss_scale: float = 1.0,
    extra: list[dict[str, Tensor]] | None = None,
) -> GradientCheck:
    """Compare what one rank's optimizer was about to get, before clipping, with the truth.

    Args:
        case: what is verified.
        truth: of this window.
        sketch: that the truth's columns were made with.
        gradient: by name, multiplied with ``loss_scale``; None where the run has none.
        loss_scale: of fp16.
        extra: further vectors that the gradient may hold a part of.
    """
    whole: Gradient = {name: tensor.double() / loss_scale for name, tensor in gradient.items() if tensor is not None}
    factors = Factors(sketch(whole), truth.columns, extra or [])
    recovered = recover_robustly(factors)
    due = truth.due_in_order
    fits = judge_tensors(factors, due)
    tensors, decisive = _tensor_errors(case, truth, whole, fits)
    return GradientCheck(
        recovered=recovered,
        max_error=weight_error(recovered.weights, due),
        tolerance=_weight_tolerance(case, truth, recovered.condition),
        residual_bound=3 * truth.rounding.residual + 4 * unit_roundoff(case.precision),
        tensors=tensors,
        ratio=_ratio(whole, truth.gradient),
        yardstick_error=decisive,
        noise=truth.noise,
        norm=math.hypot(*(float(tensor.norm()) for tensor in whole.values())) if whole else 0.0,
        factors=factors,
    )


def _weight_tolerance(case: Case, truth: WindowTruth, condition: float) -> float:
    terms = case.batch.accumulation_steps + case.batch.world_size
    low = 0.0
    if (roundoff := unit_roundoff(case.precision)) > FP32:
        low = roundoff / 8 if case.loop in LOOPS else 2 * roundoff
    return 2.5 * truth.rounding.weights + terms * FP32 * (condition if math.isfinite(condition) else 1.0) + low


def _tensor_errors(
    case: Case, truth: WindowTruth, gradient: Gradient, fits: Mapping[str, TensorFit]
) -> tuple[list[TensorError], float]:
    """Every tensor's error and bound; and the yardstick's error of the one that decides."""
    names = sorted(truth.gradient.keys() | gradient.keys())
    scale = FAINT * math.hypot(*truth.sizes.values()) if truth.sizes else 0.0

    def error(side: Mapping[str, Tensor], name: str) -> float:
        due, found = truth.gradient.get(name), side.get(name)
        if due is None and found is None:
            return 0.0
        difference = found.double() if due is None else (due if found is None else found.double() - due)  # type: ignore[union-attr]
        size = max(truth.sizes.get(name, 0.0), scale)
        norm = float(difference.norm())
        return norm / size if size else (0.0 if norm == 0 else math.inf)

    yardstick = {name: error(truth.yardsticks[0], name) for name in names}
    for name in names:
        if truth.sizes.get(name, 0.0) < scale:  # nothing but rounding, hence different each time it is computed
            yardstick[name] = max(error(each, name) for each in truth.yardsticks)
    typical = median(yardstick.values()) if yardstick else 0.0
    roundoff = 4 * _sum_roundoff(case) + unit_roundoff(case.precision) + truth.noise
    errors = []
    for name in names:
        elements = (truth.gradient.get(name, gradient.get(name))).numel()  # type: ignore[union-attr]
        spread = 2 * (1 + 6 / math.sqrt(2 * elements))
        bound = spread * max(yardstick[name], typical) + roundoff
        fit = fits.get(name)
        errors.append(
            TensorError(
                name,
                error(gradient, name),
                bound,
                fit.ratio if fit else None,
                fit.residual if fit else 0.0,
            )
        )
    decisive = max(errors, key=lambda t: _excess(t.error, t.bound), default=None)
    return errors, yardstick[decisive.name] if decisive else 0.0


def _excess(error: float, bound: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return error / bound if bound else (math.inf if error else 0.0)


def _ratio(gradient: Gradient, truth: Gradient) -> float | None:
    square = sum(float((tensor * tensor).sum()) for tensor in truth.values())
    product = sum(float((gradient[name] * tensor).sum()) for name, tensor in truth.items() if name in gradient)
    return product / square if square else None


def unit_roundoff(precision: str) -> float:
    """U of the format that the forward computes in: half the distance of 1 to the next number."""
    return torch.finfo(DTYPES[precision.removeprefix("autocast ")]).eps / 2


def _sum_roundoff(case: Case) -> float:
    """Of the coarser format that gradients are added up in: over micro-steps, or over ranks."""
    return max(torch.finfo(DTYPES[each]).eps / 2 for each in (case.accumulation_dtype, case.communication_dtype))
