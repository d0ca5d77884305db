"""How an update may have come about: what it changes then, and how far what is rounded before the rule moves that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsaccum.reference_optimizers import Optimizer, StepSettings
from dsaccum.verification.subject.capture import OptimizerStep

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """How an update may have come about; by default, as it is due.

    Attributes:
        settings: learning rate and betas.
        updates_before: Adam's count before the step.
        coefficient: what clipping multiplied the gradient by.
        absent: parameters without gradient in truth, which stay as they are; DeepSpeed has zeros for them.
        coefficient_rounding: by how much of itself the coefficient may be off.
    """

    settings: StepSettings
    updates_before: int
    coefficient: float
    absent: frozenset[str] = frozenset()
    coefficient_rounding: float = 0.0


def changes_of(
    step: OptimizerStep, rule: Optimizer, gradient: Mapping[str, Tensor], hypothesis: Hypothesis, dtype: torch.dtype
) -> Tensors:
    """The change of each parameter by the reference optimizer's rule, computed in ``dtype``, float64."""
    assert step.before is not None
    parameters = {name: tensor.to(dtype) for name, tensor in step.before.masters.items()}
    after, _ = rule.step(
        parameters,
        {name: tensor for name, tensor in gradient.items() if name in parameters},
        step.before.states,
        hypothesis.settings,
        updates_before=hypothesis.updates_before,
    )
    return {name: after[name].double() - parameters[name].double() for name in parameters}


def moved_by_rounding(
    step: OptimizerStep,
    rule: Optimizer,
    gradient: Mapping[str, Tensor],
    hypothesis: Hypothesis,
    due: Mapping[str, Tensor],
    roundoff: float,
) -> dict[str, float]:
    """How far each tensor's change moves when what is rounded before the rule goes the one way or the other; see above:
    the sum of gradient and decay, and clipping's coefficient.
    """
    assert step.before is not None
    masters = step.before.masters
    decay = 0.0 if getattr(rule, "decoupled", False) else rule.weight_decay
    if not decay and not hypothesis.coefficient_rounding:
        return {}
    moves = []
    if decay:
        sums = {
            name: roundoff * (tensor.abs() + 2 * decay * masters[name].double().abs())
            for name, tensor in gradient.items()
            if name in masters
        }
        moves.append(sums)
    if hypothesis.coefficient_rounding:
        moves.append({name: tensor * hypothesis.coefficient_rounding for name, tensor in gradient.items()})
    moved: dict[str, float] = {}
    for move in moves:
        for name, size in _moved(step, rule, gradient, hypothesis, due, move).items():
            moved[name] = moved.get(name, 0.0) + size
    return moved


def _moved(
    step: OptimizerStep,
    rule: Optimizer,
    gradient: Mapping[str, Tensor],
    hypothesis: Hypothesis,
    due: Mapping[str, Tensor],
    move: Mapping[str, Tensor],
) -> dict[str, float]:
    """By how much each tensor's change differs at the most, element by element, with the gradient moved up or down."""
    up, down = (
        changes_of(
            step, rule, {name: gradient[name] + sign * by for name, by in move.items()}, hypothesis, torch.float64
        )
        for sign in (1, -1)
    )
    return {
        name: float(torch.maximum((up[name] - due[name]).abs(), (down[name] - due[name]).abs()).norm())
        for name in move
        if name in due
    }
