"""The script's clipping between a window's last backward and the optimizer's step: of what, to what, and what followed.

With U_t a tensor's gradient before the first call that clips it, c what the calls multiplied it by (from the norms that
they found themselves, over whatever was clipped together), and C_t what the optimizer is about to get:

    f = ||C_t|| / (c ||U_t||)       what the gradient was multiplied by after clipping; 1 where clipping comes last

Where f is common to all tensors and another than 1, clipping came before the script divided or unscaled the gradients.
The gradient of the window, in the optimizer's units, is then f U, with the norm f ||U||, and so is clipping judged.
The norm, the limit over it, and their product with U round once or twice each: where nothing happened, |f - 1| is below
16 unit roundoffs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsaccum.watch.fsdp import whole

FAINT = 1e-6
"""Tensors with less of the whole norm are no witnesses: they may have lost digits below the smallest normal number."""


@dataclass(frozen=True)
class _Call:
    names: frozenset[str]
    norm: Any
    limit: float

    def coefficient(self, factor: float = 1.0) -> float:
        """As torch has it, were the norm so many times larger."""
        return min(1.0, self.limit / (factor * self.norm + 1e-6))


@dataclass(frozen=True)
class Unclipped:
    """What an optimizer is about to get, before clipping.

    Attributes:
        gradients: by name, in the optimizer's units.
        coefficients: what clipping is due to multiply each by; absent where nothing clips it.
        factor: f.
    """

    gradients: dict[str, Tensor | None]
    coefficients: dict[str, float]
    factor: float = 1.0


class EndClipping:
    """Told of each call in a window; those before the last backward are forgotten.

    Args:
        parameters: of the module, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = {id(p): name for name, p in parameters.items()}
        self._after = 0
        self._kept: dict[str, Tensor] = {}
        self._calls: list[_Call] = []
        self._under_way: frozenset[str] = frozenset()

    def before(self, tensors: list[Tensor], micro_steps: int) -> None:
        """A call begins, after so many micro-steps."""
        if micro_steps != self._after:
            self._after, self._kept, self._calls = micro_steps, {}, []
        own = {self._names[id(t)]: t.grad for t in tensors if id(t) in self._names}
        for name, gradient in own.items():
            if gradient is not None and name not in self._kept:
                self._kept[name] = gradient.detach().to("cpu", copy=True)
        self._under_way = frozenset(own)

    def after(self, norm: Any, limit: float) -> None:
        """It is over; the norm may still lie on several ranks."""
        if self._under_way:
            self._calls.append(_Call(self._under_way, norm, limit))
        self._under_way = frozenset()

    def limit(self, micro_steps: int) -> float:
        """The last call's, if it came at the end; else 0."""
        return self._calls[-1].limit if self._calls and micro_steps == self._after else 0.0

    def acted_on(self, names: Sequence[str], micro_steps: int) -> list[str]:
        """Those of them that were in the norm of a call at the end that changed the gradient."""
        if micro_steps != self._after:
            return []
        acted = [call.names for call in self._calls if float(whole(call.norm)) > call.limit]
        return [name for name in names if any(name in each for each in acted)]

    def unclipped(self, current: dict[str, Tensor | None], micro_steps: int) -> Unclipped:
        """The gradient before clipping; all ranks call this together.

        Args:
            current: the gradient as it is now.
            micro_steps: of the whole window.
        """
        self._calls = [replace(call, norm=float(whole(call.norm))) for call in self._calls]
        kept = {n: whole(self._kept[n]) for n, g in current.items() if g is not None and n in self._kept}
        if micro_steps != self._after or not kept:
            return Unclipped(current, {})
        factor = self._factor(kept, current)
        unclipped = {name: g if factor == 1.0 else factor * g.double() for name, g in kept.items()}
        return Unclipped({**current, **unclipped}, {name: self._coefficient(name, factor) for name in kept}, factor)

    def _coefficient(self, name: str, factor: float = 1.0) -> float:
        return math.prod(call.coefficient(factor) for call in self._calls if name in call.names)

    def _factor(self, kept: Mapping[str, Tensor], current: Mapping[str, Tensor | None]) -> float:
        clipped = {name: _norm(g) * self._coefficient(name) for name, g in kept.items()}
        faint = FAINT * math.hypot(*clipped.values())
        strong = {name: norm for name, norm in clipped.items() if math.isfinite(norm) and norm > faint}
        if not strong:
            return 1.0
        factors = [_norm(current[name]) / norm for name, norm in strong.items()]
        mean = sum(factors) / len(factors)
        allowed = 16 * max(torch.finfo(kept[name].dtype).eps / 2 for name in strong)
        if not mean or any(abs(each / mean - 1) > allowed for each in factors) or abs(mean - 1) <= allowed:
            return 1.0
        return mean


def _norm(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64))
