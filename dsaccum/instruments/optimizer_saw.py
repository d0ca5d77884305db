"""The gradient that the optimizer saw, after unscaling and clipping, recovered from what it did to its states.

Clipping and loss-scale faults show here and hardly in the update, which AdamW normalises away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsaccum.instruments.gradients import ObservedStep, Snapshot


@dataclass(frozen=True)
class SeenGradient:
    """A recovered gradient (float64), and how far rounding alone may put it off (L2 norm)."""

    values: Tensor
    rounding: float


def optimizer_saw(step: ObservedStep) -> dict[str, SeenGradient] | None:
    """The gradient that reached the optimizer, by parameter; None where it left no trace that we can read.

    Adam, AdamW (also fused), SGD with and without momentum, Adagrad. Weight decay that is added to the gradient
    is taken out again. Parameters that the optimizer left alone are absent.
    """
    if step.before is None or step.after is None or not step.applied:
        return None
    recover = _method(step.optimizer)
    if recover is None:
        return None
    seen = {}
    for name in step.before.masters:
        found = recover(step.before, step.after, name, _coupled_decay(step.optimizer, step.before.options[name]))
        if found is not None:
            sign = -1.0 if step.before.options[name].get("maximize") else 1.0
            seen[name] = SeenGradient(sign * found.values, found.rounding)
    return seen


Recover = Callable[[Snapshot, Snapshot, str, float], SeenGradient | None]


def _method(optimizer: Any) -> Recover | None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or kind in ("FusedAdam", "DeepSpeedCPUAdam"):
        return _from_adam
    if isinstance(optimizer, torch.optim.SGD):
        return _from_sgd
    if isinstance(optimizer, torch.optim.Adagrad):
        return _from_adagrad
    return None


def _coupled_decay(optimizer: Any, options: dict[str, Any]) -> float:
    """Weight decay that was added to the gradient, rather than applied to the parameter."""
    decoupled = options.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    if getattr(optimizer, "adam_w_mode", False):
        decoupled = True
    return 0.0 if decoupled else float(options.get("weight_decay") or 0.0)


def _from_adam(before: Snapshot, after: Snapshot, name: str, decay: float) -> SeenGradient | None:
    """m_t = b1 m_(t-1) + (1 - b1) g, so g = (m_t - b1 m_(t-1)) / (1 - b1)."""
    if "exp_avg" not in after.states[name]:
        return None
    beta = float(before.options[name]["betas"][0])
    new, old, epsilon = _moments(before, after, name, "exp_avg")
    seen = (new - beta * old) / (1 - beta)
    # Each of the three float operations that make m_t rounds to half an epsilon of what it handles.
    rounding = epsilon * (float(new.norm()) + float(old.norm())) / (1 - beta) + epsilon * float(seen.norm())
    return _without_decay(seen, rounding, before, name, decay, epsilon)


def _from_sgd(before: Snapshot, after: Snapshot, name: str, decay: float) -> SeenGradient | None:
    """Without momentum p_t = p_(t-1) - lr g; with it b_t = mu b_(t-1) + (1 - damping) g, and b_1 = g."""
    options = before.options[name]
    momentum = float(options.get("momentum") or 0.0)
    if momentum:
        if "momentum_buffer" not in after.states[name]:
            return None
        new, old, epsilon = _moments(before, after, name, "momentum_buffer")
        first = "momentum_buffer" not in before.states[name]
        share = 1.0 if first else 1.0 - float(options.get("dampening") or 0.0)
        if share == 0.0:
            return None
        seen = (new - momentum * old) / share
        rounding = epsilon * (float(new.norm()) + momentum * float(old.norm())) / share
        return _without_decay(seen, rounding, before, name, decay, epsilon)
    rate = float(options["lr"])
    if rate == 0.0:
        return None
    old, new = before.masters[name], after.masters[name]
    epsilon = torch.finfo(old.dtype).eps
    seen = (old.double() - new.double()) / rate
    rounding = epsilon * float(torch.maximum(old.abs(), new.abs()).double().norm()) / rate
    return _without_decay(seen, rounding + epsilon * float(seen.norm()), before, name, decay, epsilon)


def _from_adagrad(before: Snapshot, after: Snapshot, name: str, decay: float) -> SeenGradient | None:
    """sum_t = sum_(t-1) + g^2; the sign of g is that of the parameter's way down, if it went any."""
    if "sum" not in after.states[name] or float(before.options[name]["lr"]) == 0.0:
        return None
    new, old, epsilon = _moments(before, after, name, "sum")
    down = before.masters[name].double() - after.masters[name].double()
    size = (new - old).clamp(min=0).sqrt()
    seen = size * down.sign()
    # d sqrt(x) <= sqrt(dx): the worst case, for gradients that vanish in the sum. Where the parameter took no step that
    # its last digit could show, the gradient has a size and no sign.
    rounding = float((epsilon * new).sqrt().norm()) + float(size[down == 0].norm())
    return _without_decay(seen, rounding, before, name, decay, epsilon)


def _moments(before: Snapshot, after: Snapshot, name: str, key: str) -> tuple[Tensor, Tensor, float]:
    new = after.states[name][key]
    old = before.states[name].get(key, torch.zeros_like(new))
    return new.double(), old.double(), torch.finfo(new.dtype).eps


def _without_decay(
    seen: Tensor, rounding: float, before: Snapshot, name: str, decay: float, epsilon: float
) -> SeenGradient:
    if not decay:
        return SeenGradient(seen, rounding)
    added = decay * before.masters[name].double()
    return SeenGradient(seen - added, rounding + epsilon * float(added.norm()))
