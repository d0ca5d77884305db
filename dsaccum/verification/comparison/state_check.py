"""Optimizer states that became zeros inside a step, which makes the gradient that is recovered from them a wrong one.

With m Adam's first moment and g the gradient that is due, elements for which (m_t - b1 m_(t-1)) / (1 - b1) is not g:

    lost before its use    m_t = (1 - b1) g, as if m_(t-1) had been 0
    lost after it          m_t = 0 and v_t = 0, though the parameter moved further than its decay
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsaccum.verification.comparison.update_check import due_coefficient, unscaled
from dsaccum.verification.subject.capture import OptimizerStep

FEWEST = 4
"""Elements in all: fewer could be a coincidence."""
NEAR = 1e-3
"""Of an element: rounding of the moments is far less, and what a lost moment makes is far more."""


def lost_states(step: OptimizerStep, limit: float) -> Mapping[str, Tensor]:
    """Which elements of which parameters; empty where every trace is right, or wrong in another way."""
    if not step.saw or step.before is None or step.after is None:
        return {}
    coefficient, gradient = due_coefficient(step, limit), unscaled(step)
    lost, wrong_ones = {}, 0
    for name, seen in step.saw.items():
        after, before = step.after.states[name], step.before.states[name]
        if name not in gradient or "exp_avg" not in after or "exp_avg_sq" not in after:
            continue
        due, options = gradient[name] * coefficient, step.before.options[name]
        new = after["exp_avg"].double()
        old = before.get("exp_avg", torch.zeros_like(new)).double()
        epsilon, beta = torch.finfo(after["exp_avg"].dtype).eps, float(options["betas"][0])
        allowed = NEAR * due.abs() + 8 * epsilon * (new.abs() + old.abs()) / (1 - beta) + 1e-30
        off, off_if_first = (seen.values - due).abs(), (new / (1 - beta) - due).abs()
        wrong = off > allowed
        if not bool(wrong.any()):
            continue
        if bool((off_if_first <= allowed)[wrong].all() & (old != 0)[wrong].all()):
            lost[name] = off_if_first < off  # those, too, of which it changes less than is seen to be wrong
        elif bool(((new == 0) & (after["exp_avg_sq"] == 0))[wrong].all()):
            moved = (step.after.masters[name].double() - step.before.masters[name].double()).abs()
            decay = 2 * float(options["lr"]) * float(options.get("weight_decay") or 0.0)
            further = moved > decay * step.before.masters[name].double().abs()
            if float(further[wrong].double().mean()) <= 0.5:
                continue
            lost[name] = (new == 0) & (off > 0)
        else:
            continue
        wrong_ones += int(wrong.sum())
    return lost if wrong_ones >= FEWEST else {}
