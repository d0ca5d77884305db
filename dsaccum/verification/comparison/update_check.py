"""One optimizer step against the reference optimizer, given the gradient that DeepSpeed had.

Parameters, states and count are taken over from the run before each step, so that an error shows at the step where it
happens. With u the unit roundoff of what the optimizer steps (2^-24 for fp32 masters), for each tensor:

    error_t     ||D_t - due_t|| / ||due_t||, D the change of the parameter
    bound_t     3 y_t + 2 u ||p_t|| / ||due_t|| + z_t / ||due_t|| + 16 u
                y_t: the same rule in the masters' own precision against float64; the second term is the rounding of the
                parameter itself, one ulp of it at the most
                z_t: where weight decay is added to the gradient, g + c p rounds by u (|g| + 2 |c p|), c being rounded,
                too. Where the sum cancels, Adam divides what is left by its own size: then one element moves by up to
                the rate, in y_t as well, but not in the same elements. z_t is the largest move, element by element
    saw         what reached the optimizer against clipping done anew; bounded by what its recovery may round, 8 u for
                products, and where clipping acts u sqrt(P) for the norm: P squares added up in float32

The norm's rounding is one factor on all gradients, and Adam's change moves with it from the second step on. Where what
reached the optimizer is known, the update is judged with that factor; where it is not, z_t is also the move by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsaccum.instruments.gradients import Snapshot
from dsaccum.reference_optimizers import Optimizer, StepSettings, clip_coefficient, global_norm
from dsaccum.verification.comparison.hypothesis import Hypothesis, Tensors, changes_of, moved_by_rounding
from dsaccum.verification.subject.capture import OptimizerStep


@dataclass(frozen=True)
class UpdateError:
    """One tensor's change: relative error, bound, and ratio to what is due (None where nothing is due)."""

    name: str
    error: float
    bound: float
    ratio: float | None

    @property
    def off(self) -> bool:
        """Outside its bound; so is what isn't a number."""
        return not self.error <= self.bound


@dataclass(frozen=True)
class UpdateCheck:
    """The change of every parameter under one hypothesis; ``moved`` is False where no change is due (rate 0)."""

    tensors: list[UpdateError]
    ratio: float | None
    moved: bool

    @property
    def worst(self) -> UpdateError | None:
        """The tensor that decides."""
        return max(self.tensors, key=lambda t: _excess(t.error, t.bound), default=None)

    @property
    def off(self) -> list[UpdateError]:
        """Tensors outside their bounds, the furthest first."""
        return sorted((t for t in self.tensors if t.off), key=lambda t: -_excess(t.error, t.bound))

    @property
    def passed(self) -> bool:
        """Every tensor changed as it should."""
        return not self.off


@dataclass(frozen=True)
class SawCheck:
    """The gradient that reached the optimizer: error and bound relative to the clipped gradient, and the ratio."""

    error: float
    bound: float
    ratio: float | None
    coefficient: float
    """What clipping was due to multiply by."""

    @property
    def passed(self) -> bool:
        """Within its bound."""
        return self.error <= self.bound

    @property
    def clips(self) -> bool:
        """Whether the limit was reached."""
        return self.coefficient < 1

    @property
    def is_a_multiple(self) -> bool:
        """Whether another coefficient explains it: ||seen - ratio due|| is within the bound, in units of ||due||.

        With error = ||seen - due|| / ||due|| that is error^2 - (ratio - 1)^2, of which half the digits cancel.
        """
        if self.ratio is None or not math.isfinite(self.error):
            return False
        left = math.sqrt(max(self.error**2 - (self.ratio - 1) ** 2, 0.0))
        return left <= max(1.0, abs(self.ratio)) * self.bound + 1e-7 * self.error


def check_optimizer_saw(
    step: OptimizerStep, limit: float, leave_out: Mapping[str, Tensor] | None = None
) -> SawCheck | None:
    """Compare what reached the optimizer with the reduced gradient, unscaled and clipped anew.

    Args:
        step: with what was before and after it.
        limit: of the norm.
        leave_out: elements of which the trace is lost, by parameter.

    Returns:
        None where the optimizer leaves no trace of it, or the step was not applied.
    """
    if not step.saw:
        return None
    gradient = unscaled(step)
    coefficient = due_coefficient(step, limit)
    difference, size, product, square, rounding = 0.0, 0.0, 0.0, 0.0, 0.0
    for name, seen in step.saw.items():
        due = gradient[name] * coefficient if name in gradient else torch.zeros_like(seen.values)
        values = seen.values
        if leave_out and name in leave_out:
            values, due = values[~leave_out[name]], due[~leave_out[name]]
        difference = math.hypot(difference, float((values - due).norm()))
        size = math.hypot(size, float(due.norm()))
        rounding = math.hypot(rounding, seen.rounding)
        product += float((values * due).sum())
        square += float((due * due).sum())
    roundoff = torch.finfo(torch.float32).eps / 2
    if not size:
        if leave_out:
            return None
        return SawCheck(0.0 if difference == 0 else math.inf, 0.0, None, coefficient)
    bound = rounding / size + 8 * roundoff + _norm_rounding(gradient, coefficient)
    return SawCheck(difference / size, bound, product / square, coefficient)


def hypothesis_of(
    step: OptimizerStep,
    saw: SawCheck | None,
    limit: float,
    settings: StepSettings,
    updates_before: int,
    absent: frozenset[str],
) -> Hypothesis:
    """The update as it is due, given the gradient that reached the optimizer.

    Where clipping acts, it is judged by ``saw``; the update is judged with what came out of it, right or wrong.
    """
    if saw is None:
        coefficient = due_coefficient(step, limit)
        return Hypothesis(settings, updates_before, coefficient, absent, _norm_rounding(unscaled(step), coefficient))
    coefficient = saw.coefficient
    if saw.ratio is not None and (saw.clips or not saw.passed):
        coefficient *= saw.ratio
    return Hypothesis(settings, updates_before, coefficient, absent)


def _norm_rounding(gradient: Tensors, coefficient: float) -> float:
    """What clipping's norm rounds, relative to itself; see above."""
    if coefficient >= 1:
        return 0.0
    return torch.finfo(torch.float32).eps / 2 * math.sqrt(sum(tensor.numel() for tensor in gradient.values()))


def check_update(step: OptimizerStep, optimizer: Optimizer, hypothesis: Hypothesis) -> UpdateCheck:
    """Compare the parameters' change with that of the reference optimizer.

    Args:
        step: with what was before and after it.
        optimizer: rebuilt from the config.
        hypothesis: what to assume.
    """
    assert step.before is not None
    assert step.after is not None
    gradient = {
        name: tensor * hypothesis.coefficient
        for name, tensor in unscaled(step).items()
        if name not in hypothesis.absent
    }
    due = changes_of(step, optimizer, gradient, hypothesis, torch.float64)
    own_precision = next(iter(step.before.masters.values())).dtype
    rounded = changes_of(step, optimizer, gradient, hypothesis, own_precision)
    roundoff = torch.finfo(own_precision).eps / 2
    moved = moved_by_rounding(step, optimizer, gradient, hypothesis, due, roundoff)
    errors, product, square = [], 0.0, 0.0
    for name, before in step.before.masters.items():
        change = step.after.masters[name].double() - before.double()
        wanted = due[name]
        size = float(wanted.norm())
        distance = float((change - wanted).norm())
        product += float((change * wanted).sum())
        square += float((wanted * wanted).sum())
        if not size:
            errors.append(UpdateError(name, 0.0 if distance == 0 else math.inf, 0.0, None))
            continue
        yardstick = float((rounded[name] - wanted).norm()) / size
        ulp = roundoff * float(before.double().norm()) / size
        ratio = float((change * wanted).sum()) / float((wanted * wanted).sum())
        bound = 3 * yardstick + 2 * ulp + moved.get(name, 0.0) / size + 16 * roundoff
        errors.append(UpdateError(name, distance / size, bound, ratio))
    return UpdateCheck(errors, product / square if square else None, moved=square > 0)


def unscaled(step: OptimizerStep) -> Tensors:
    """The reduced gradient before clipping, float64."""
    return {name: tensor.double() / step.loss_scale for name, tensor in step.gradients.items() if tensor is not None}


def due_coefficient(step: OptimizerStep, limit: float) -> float:
    """What clipping is due to multiply the reduced gradient by."""
    return clip_coefficient(global_norm(unscaled(step)), limit)


def rates_used(step: OptimizerStep) -> set[float]:
    """Learning rates of the parameter groups in this step."""
    assert step.before is not None
    return {float(options["lr"]) for options in step.before.options.values()}


def changed_between(earlier: OptimizerStep, later: OptimizerStep) -> list[str]:
    """Parameters that are not what the earlier step left, in themselves or in their optimizer states."""
    if earlier.after is None or later.before is None:
        return []
    left, found = earlier.after, later.before
    return [
        name
        for name, master in found.masters.items()
        if not torch.equal(left.masters[name], master)
        or any(
            value.dim() and not torch.equal(value, found.states[name].get(key, torch.empty(0)))
            for key, value in left.states[name].items()
        )
    ]


def frozen_between(earlier: OptimizerStep, later: OptimizerStep) -> list[str]:
    """Parameters that are not trained and are not what they were after the earlier step."""
    if earlier.after is None or later.before is None:
        return []
    return _frozen(earlier.after, later.before)


def frozen_changes(step: OptimizerStep) -> list[str]:
    """Parameters that are not trained and changed all the same."""
    assert step.before is not None
    assert step.after is not None
    return _frozen(step.before, step.after)


def _frozen(before: Snapshot, after: Snapshot) -> list[str]:
    return [
        name
        for name, value in before.parameters.items()
        if name not in before.masters and not torch.equal(value, after.parameters[name])
    ]


def _excess(error: float, bound: float) -> float:
    if not math.isfinite(error):
        return math.inf
    return error / bound if bound else (math.inf if error else 0.0)
