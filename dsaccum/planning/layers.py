"""A deep model's micro-step from one of four layers: equal layers do the same things, one after the other.

The first layer and the last differ from those between in what they are the first or the last to use, and what the
last one's backward pass begins with. So the trace of four is cut around one in the middle: in the forward pass where
the second and the third end, in the backward pass after the last gradient of the third and of the second. What lies
between two cuts comes once for each of L - 3 layers. With K bytes kept by a layer's forward pass:

    forward repetition  m = 0 .. L - 4: m K more than in the trace of four
    backward repetition m = 0 .. L - 4: (L - 4 - m) K more
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from dsaccum.planning.trace import IntArray, Kind, MicroStep, joined

_TRACED = 4
"""Of more layers, only so many are run."""


@dataclass(frozen=True)
class Layers:
    """Equal layers that a model runs one after the other.

    Attributes:
        parent: the module that holds them.
        name: under which name it does.
        blocks: all of them.
    """

    parent: nn.Module
    name: str
    blocks: nn.ModuleList

    @contextmanager
    def only_some(self) -> Iterator[None]:
        """Inside, the model has the first few of them."""
        setattr(self.parent, self.name, nn.ModuleList(self.blocks[:_TRACED]))
        try:
            yield
        finally:
            setattr(self.parent, self.name, self.blocks)


def equal_layers(model: nn.Module) -> Layers | None:
    """The longest list of equal layers; None where there is none to speak of."""
    lists = [
        Layers(parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) > _TRACED and _are_equal(child)
    ]
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.blocks.parameters()), default=None)


def _are_equal(blocks: nn.ModuleList) -> bool:
    first = _signature(blocks[0])
    return all(_signature(block) == first for block in blocks)


def _signature(block: nn.Module) -> list[Any]:
    """Classes, settings and shapes; where a layer stands in the row makes no difference."""
    return [
        (
            name,
            type(module),
            sorted(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, bool | int | float | str) and not key.endswith(("_idx", "_id"))
            ),
            [(key, tuple(p.shape), p.requires_grad) for key, p in module.named_parameters(recurse=False)],
        )
        for name, module in block.named_modules()
    ]


def record_whole(model: nn.Module, layers: Layers, record: Callable[[], MicroStep]) -> MicroStep | None:
    """The micro-step of the whole model from that of a few layers; None if it cannot be had that way.

    Args:
        model: the whole model.
        layers: its equal layers.
        record: records a micro-step of the model as it is then.

    Returns:
        Subjects are indices of the whole model's parameters and modules.
    """
    with layers.only_some():
        short = record()
        parameters, modules = list(model.parameters()), list(model.modules())
    whole = _Indices(model)
    subjects = np.array(
        [
            whole.parameters[id(parameters[subject])]
            if kind == Kind.GRADIENT
            else whole.modules[id(modules[subject])]
            if subject >= 0
            else -1
            for kind, subject in zip(short.kind, short.subject, strict=True)
        ]
    )
    return _Unrolling(short, subjects, layers, whole).whole()


class _Indices:
    """Where each parameter and module stands in the whole model."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = {id(parameter): index for index, parameter in enumerate(model.parameters())}
        self.modules = {id(module): index for index, module in enumerate(model.modules())}


class _Unrolling:
    def __init__(self, short: MicroStep, subjects: IntArray, layers: Layers, whole: _Indices) -> None:
        self._short, self._subjects, self._count = short, subjects, len(layers.blocks)
        self._parameters = [[whole.parameters[id(p)] for p in block.parameters()] for block in layers.blocks]
        self._kept = self._kept_logits = 0
        self._modules = [[whole.modules[id(m)] for m in block.modules()] for block in layers.blocks]

    def whole(self) -> MicroStep | None:
        cuts = self._cuts()
        if cuts is None:
            return None
        second_left, third_left, third_done, second_done = cuts
        alive = self._short.alive
        self._kept = int(alive[third_left] - alive[second_left])
        self._kept_logits = int(self._short.logits[third_left] - self._short.logits[second_left])
        if alive[third_done] - alive[second_done] != self._kept:
            return None  # the layers are not alike in what they keep
        more = self._count - _TRACED
        parts = [self._part(-1, second_left, 0)]
        parts += [self._part(second_left, third_left, m) for m in range(more + 1)]
        parts += [self._part(third_left, third_done, more)]
        parts += [self._part(third_done, second_done, more - m) for m in range(more + 1)]
        parts += [self._part(second_done, len(alive) - 1, 0)]
        return joined(parts)

    def _cuts(self) -> tuple[int, int, int, int] | None:
        """The last event of the second and third layer's forward, and of the third and second layer's backward."""
        lefts, dones = [], []
        for layer in (1, 2):
            in_layer = np.isin(self._subjects, self._modules[layer])
            left = np.flatnonzero((self._short.kind == Kind.EXIT) & ~self._short.backward & in_layer)
            has_gradient = np.isin(self._subjects, self._parameters[layer])
            done = np.flatnonzero((self._short.kind == Kind.GRADIENT) & has_gradient)
            if not len(left) or not len(done):
                return None
            lefts.append(int(left[-1]))
            dones.append(int(done[-1]))
        cuts = lefts[0], lefts[1], dones[1], dones[0]
        return cuts if list(cuts) == sorted(cuts) else None

    def _part(self, after: int, last: int, higher: int) -> MicroStep:
        """The events after one and up to another, as they come so many layers higher up."""
        events = slice(after + 1, last + 1)
        subjects, kinds = self._subjects[events].copy(), self._short.kind[events]
        for numbers, of_kind in ((self._parameters, kinds == Kind.GRADIENT), (self._modules, kinds != Kind.GRADIENT)):
            place: dict[int, int] = {}
            for layer in range(_TRACED):
                if layer + higher < self._count:
                    place |= zip(numbers[layer], numbers[layer + higher], strict=True)
            subjects[of_kind] = [place.get(subject, subject) for subject in subjects[of_kind].tolist()]
        return MicroStep(
            kinds,
            subjects,
            self._short.backward[events],
            self._short.alive[events] + higher * self._kept,
            self._short.logits[events] + higher * self._kept_logits,
            self._short.flops[events],
        )
