"""From a window's gradient to its update: clipping and the optimizers, rebuilt from a DeepSpeed JSON in plain PyTorch.

Written from the formulas. DeepSpeed's fused and CPU kernels and ``torch.optim`` arrange them differently, but they are
the same mathematics; everything is computed in the type of the parameters given (float64 for the truth).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
ParameterState = Mapping[str, Any]
"""One parameter's optimizer state in torch's names: ``step`` (a number), ``exp_avg``, ``momentum_buffer``, ..."""


@dataclass(frozen=True)
class NotRebuilt:
    """Stands for an optimizer or schedule that has no counterpart here: its updates are untested."""

    reason: str


@dataclass(frozen=True)
class StepSettings:
    """What a schedule sets for one update; ``betas`` is None for optimizers that have none."""

    learning_rate: float
    betas: tuple[float, float] | None = None


def global_norm(gradient: Mapping[str, Tensor]) -> float:
    """L2 norm over all parameters, in float64; tied weights are one entry, hence count once."""
    return math.hypot(*(tensor.double().norm().item() for tensor in gradient.values()))


def clip_coefficient(norm: float, limit: float) -> float:
    """What clipping multiplies a gradient by: min(1, limit / (norm + 1e-6)); a limit of 0 means no clipping.

    DeepSpeed writes this in two ways, equal but for rounding (s is the loss scale, ``norm`` that of the unscaled
    gradient):

        fp32 at ZeRO 0; bf16 accumulated in fp32    gradient * min(1, limit / (norm + 1e-6))
        ZeRO 1 to 3; fp16 and bf16 at ZeRO 0        gradient / (s * max(1, (s norm / s + 1e-6) / limit))

    They part where the norm is not finite: the first spoils every gradient, the others skip the step before. And the
    1e-6 shows: a gradient of exactly the limit's norm is shrunk by 1e-6 / limit.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def clipped(gradient: Mapping[str, Tensor], limit: float) -> Tensors:
    """The gradient after clipping by its global norm."""
    coefficient = clip_coefficient(global_norm(gradient), limit)
    return {name: tensor * coefficient for name, tensor in gradient.items()}


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """An update rule and its settings. It holds no state: state goes in and comes out."""

    learning_rate: float
    betas: tuple[float, float] | None = None
    weight_decay: float = 0.0

    def step(
        self,
        parameters: Mapping[str, Tensor],
        gradient: Mapping[str, Tensor],
        state: Mapping[str, ParameterState],
        settings: StepSettings | None = None,
        *,
        updates_before: int | None = None,
    ) -> tuple[Tensors, dict[str, ParameterState]]:
        """One update; returns the new parameters and the new state, and changes nothing that it was given.

        Args:
            parameters: by name, all of them.
            gradient: by name. A parameter without an entry is left alone, as torch does; DeepSpeed makes zeros of
                missing gradients, so that weight decay acts: give zeros to follow it.
            state: what was there before this update, e.g. taken over from the run under test. A parameter without an
                entry starts anew.
            settings: this update's learning rate and betas from a schedule; None for the JSON's own.
            updates_before: how many updates were made before; None to believe each ``step`` in ``state``. DeepSpeed's
                are not to be believed: FusedAdam counts in the state of a group's last parameter alone, and bf16 at
                ZeRO 0 starts at 1.
        """
        settings = settings or StepSettings(self.learning_rate, self.betas)
        new_parameters, new_state = dict(parameters), dict(state)
        for name, tensor in gradient.items():
            parameter = parameters[name].detach()
            before = {
                key: value.to(parameter.dtype) if isinstance(value, Tensor) and value.dim() else value
                for key, value in state.get(name, {}).items()
            }
            if updates_before is not None:
                before["step"] = updates_before
            new_parameters[name], new_state[name] = self._update(
                parameter, tensor.detach().to(parameter.dtype), before, settings
            )
        return new_parameters, new_state

    @abstractmethod
    def _update(
        self, p: Tensor, g: Tensor, state: ParameterState, settings: StepSettings
    ) -> tuple[Tensor, ParameterState]: ...


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), or AdamW (Loshchilov and Hutter 2019) where ``decoupled``."""

    eps: float
    decoupled: bool
    bias_correction: bool = True

    def _update(
        self, p: Tensor, g: Tensor, state: ParameterState, settings: StepSettings
    ) -> tuple[Tensor, ParameterState]:
        assert settings.betas is not None
        (beta1, beta2), rate = settings.betas, settings.learning_rate
        t = int(state.get("step", 0)) + 1
        if not self.decoupled:
            g = g + self.weight_decay * p
        m = beta1 * state.get("exp_avg", torch.zeros_like(p)) + (1 - beta1) * g
        v = beta2 * state.get("exp_avg_sq", torch.zeros_like(p)) + (1 - beta2) * g * g
        correction1, correction2 = (1 - beta1**t, 1 - beta2**t) if self.bias_correction else (1.0, 1.0)
        direction = (m / correction1) / ((v / correction2).sqrt() + self.eps)
        if self.decoupled:
            direction = direction + self.weight_decay * p
        return p - rate * direction, {"step": t, "exp_avg": m, "exp_avg_sq": v}


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Gradient descent with momentum as torch has it: the first step takes the gradient undampened."""

    momentum: float
    dampening: float
    nesterov: bool

    def _update(
        self, p: Tensor, g: Tensor, state: ParameterState, settings: StepSettings
    ) -> tuple[Tensor, ParameterState]:
        g = g + self.weight_decay * p
        if not self.momentum:
            return p - settings.learning_rate * g, {}
        before = state.get("momentum_buffer")
        buffer = g if before is None else self.momentum * before + (1 - self.dampening) * g
        direction = g + self.momentum * buffer if self.nesterov else buffer
        return p - settings.learning_rate * direction, {"momentum_buffer": buffer}


@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011) with torch's decay of the rate."""

    eps: float
    lr_decay: float
    initial_accumulator_value: float

    def _update(
        self, p: Tensor, g: Tensor, state: ParameterState, settings: StepSettings
    ) -> tuple[Tensor, ParameterState]:
        t = int(state.get("step", 0)) + 1
        g = g + self.weight_decay * p
        squares = state.get("sum", torch.full_like(p, self.initial_accumulator_value)) + g * g
        rate = settings.learning_rate / (1 + (t - 1) * self.lr_decay)
        return p - rate * g / (squares.sqrt() + self.eps), {"step": t, "sum": squares}


# Parameters that choose how the same formula is computed.
_HOW = {"torch_adam", "adam_w_mode", "foreach", "fused", "capturable", "differentiable", "set_grad_none"}
# Parameters whose formulas are not here, and the value at which they change nothing.
_NEUTRAL = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": False, "fp32_optimizer_states": True}


def rebuild_optimizer(block: Mapping[str, Any] | None) -> Optimizer | NotRebuilt:
    """The optimizer of a DeepSpeed JSON's ``optimizer`` block, its ``"auto"`` values resolved before.

    By DeepSpeed's rules: its own names are read in any case, torch's exactly; ``Adam`` is AdamW unless
    ``adam_w_mode`` is false, and ``AdamW`` is AdamW always; with ``torch_adam`` the defaults are torch's, where AdamW
    decays by 0.01 if nothing is said.

    Raises:
        ValueError: a value is no number, e.g. still ``"auto"``.
    """
    if block is None or "type" not in block:
        return NotRebuilt("the config names no optimizer")
    name, given = str(block["type"]), dict(block.get("params") or {})
    defaults: dict[str, Any]
    kind: type[Optimizer]
    extra: dict[str, Any] = {}
    if name.lower() in ("adam", "adamw"):
        decoupled = name.lower() == "adamw" or bool(given.get("adam_w_mode", True))
        decay = 0.01 if decoupled and given.get("torch_adam") else 0.0
        kind, extra = Adam, {"decoupled": decoupled}
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay, "bias_correction": True}
    elif name.lower() == "adagrad":
        kind = Adagrad
        defaults = {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}
    elif name == "SGD":
        kind = SGD
        defaults = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
    else:
        return NotRebuilt(f"optimizer {name} is not rebuilt here")
    for key, value in given.items():
        if key not in defaults and key not in _HOW and (key not in _NEUTRAL or value not in (None, _NEUTRAL[key])):
            return NotRebuilt(f"optimizer {name} with {key} {value} is not rebuilt here")
    settings = {key: _as_type_of(default, given.get(key, default)) for key, default in defaults.items()}
    return kind(learning_rate=settings.pop("lr"), **settings, **extra)


def _as_type_of(default: Any, value: Any) -> Any:
    if value == "auto":
        raise ValueError('an optimizer needs numbers, not "auto"')
    if isinstance(default, bool):
        return bool(value)
    if isinstance(default, tuple):
        first, second = value
        return float(first), float(second)
    return float(value)
