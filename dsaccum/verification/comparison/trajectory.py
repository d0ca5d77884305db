"""All steps in one go, without taking anything over from the run: a further sight, on which no verdict rests.

A correct run drifts away from any other by rounding alone, and Adam enlarges that in single elements (0.07 of the rate
in one step). So whole vectors are compared, the run's with those of one big batch at every step. The bound is what
rounding does to the reference itself: three more runs of it whose parameters start one unit in the last place away, and
one that accumulates, which in low precision rounds elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from dsaccum.reference import Gradient
from dsaccum.reference_optimizers import Optimizer, ParameterState, clipped
from dsaccum.reference_schedules import Schedule
from dsaccum.verification.cases.case import Case, WindowChoice
from dsaccum.verification.comparison.truth import ReferenceSide
from dsaccum.verification.records.parts import TrajectoryRecord

PERTURBED_RUNS = 3
SAFETY = 3.0
"""Over the largest of a few draws from the same scatter."""
Values = Mapping[str, Tensor]
GradientOf = Callable[[WindowChoice, Values], Gradient]


def compare_trajectory(
    case: Case,
    side: ReferenceSide,
    optimizer: Optimizer,
    schedule: Schedule,
    *,
    start: Values,
    states: Mapping[str, ParameterState],
    frozen: Values,
    run: Sequence[Values],
) -> TrajectoryRecord:
    """Relative L2 distance of the run's parameters to the reference's own, after each step.

    Args:
        case: what is verified.
        side: computes gradients in the config's precision.
        optimizer: rebuilt.
        schedule: rebuilt.
        start: what the optimizer steps, before the first window.
        states: the optimizer's, then; empty where it begins.
        frozen: buffers, and parameters that are not trained, as the forward used them.
        run: the same after each window of the run under test.
    """

    def steps_from(values: Values, gradient_of: GradientOf) -> list[dict[str, Tensor]]:
        return _reference_run(case, gradient_of, optimizer, schedule, values, states, frozen)

    reference = steps_from(start, side.big_batch_gradient)
    distances = [_distance(own, other) for own, other in zip(run, reference, strict=True)]
    others = [steps_from(_one_ulp_away(start, seed), side.big_batch_gradient) for seed in range(PERTURBED_RUNS)]
    others.append(steps_from(start, side.accumulated_gradient))
    spread = max(_distance(one, two) for each in others for one, two in zip(each, reference, strict=True))
    return TrajectoryRecord(max=max(distances), mean_drift=fmean(distances), bound=SAFETY * spread)


def _reference_run(
    case: Case,
    gradient_of: GradientOf,
    optimizer: Optimizer,
    schedule: Schedule,
    start: Values,
    states: Mapping[str, ParameterState],
    frozen: Values,
) -> list[dict[str, Tensor]]:
    """What the optimizer steps, after each window."""
    masters: dict[str, Tensor] = {name: value.float() for name, value in start.items()}
    state = states
    after = []
    for update, choice in enumerate(case.windows, start=case.updates_before + 1):
        gradient = gradient_of(choice, {**frozen, **masters})
        asked = {name: tensor.float() for name, tensor in gradient.items()}
        masters, new_state = optimizer.step(
            masters, clipped(asked, case.gradient_clipping), state, schedule(update), updates_before=update - 1
        )
        state = new_state
        after.append(masters)
    return after


def _one_ulp_away(values: Values, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, value in values.items():
        up = torch.randint(2, value.shape, generator=generator, dtype=torch.bool)
        target = torch.where(up, math.inf, -math.inf).to(value.dtype)
        moved[name] = torch.nextafter(value, target)
    return moved


def _distance(first: Values, second: Values) -> float:
    """||first - second|| / ||second|| over all parameters."""
    difference = math.hypot(*(float((first[name].double() - second[name].double()).norm()) for name in second))
    size = math.hypot(*(float(value.double().norm()) for value in second.values()))
    return difference / size if size else 0.0
