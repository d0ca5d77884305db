"""What a window's operations say of it: what each micro-step communicates, and what stays alive from one to the next.

A micro-step here is from its first forward to the next one's. Nothing of the watch's own is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsaccum.instruments.collectives import (
    BACKWARD,
    CONTROL,
    ELSEWHERE,
    GRADIENT,
    REDUCING,
    Collective,
    MicroStepTraffic,
    bytes_of,
    classify,
    collective_of,
    totals_by_micro_step,
)
from dsaccum.instruments.live_storages import LiveStorages
from dsaccum.watch.operations import OperationWatch

_at_work: list[WindowMeasures] = []
"""Where there are several engines, what one exchanges is not another's."""


@dataclass
class Measured:
    """One window on one rank.

    Attributes:
        traffic: of each micro-step.
        before: bytes of tensors alive when each micro-step's first forward begins.
        held: bytes alive when its backward begins: with its activations.
        reason: why there is nothing of all this.
        memory_reason: why ``before`` and ``held`` say nothing.
        others: other models are trained in this process.
    """

    traffic: list[MicroStepTraffic] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    reason: str | None = None
    memory_reason: str | None = None
    others: bool = False


class WindowMeasures:
    """Measures from now on.

    Args:
        trained: parameters, whose gradients may be reduced by the script itself.
    """

    def __init__(self, trained: Callable[[], Iterable[Tensor]]) -> None:
        self._trained = trained
        self._collectives: list[Collective] = []
        self._live = LiveStorages()
        self._before: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._now, self._phase = 1, ELSEWHERE
        self._reason: str | None = None
        self._operations = OperationWatch(self._see, self._failed)
        self._reason = self._reason or self._operations.reason
        self._tasks: set[int] = set()

    def forward_begins(self, micro_step: int) -> None:
        """The first of a micro-step, from 1."""
        self._now = micro_step
        with self._told():
            self._before[micro_step] = self._live.bytes_at_rest(self._before.get(micro_step - 1, 0))

    def backward_begins(self, micro_step: int) -> None:
        """A gradient has arrived, in a backward pass of this module."""
        self._now = micro_step
        self._tasks.add(torch._C._current_graph_task_id())
        with self._told():
            self._held.setdefault(micro_step, self._live.bytes())

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Inside, the engine does what its name says."""
        before, self._phase = self._phase, phase
        _at_work.append(self)
        try:
            yield
        finally:
            self._phase = before
            _at_work.remove(self)

    def stop(self) -> None:
        """No more."""
        self._operations.stop()

    def give_up(self, reason: str) -> None:
        """Nothing is told of this window."""
        self._reason = reason

    def result(self, micro_steps: int) -> Measured:
        """Of a window that had so many."""
        if self._reason is not None:
            return Measured(reason=self._reason)
        steps = range(1, micro_steps + 1)
        return Measured(
            totals_by_micro_step(self._collectives, micro_steps),
            [self._before[step] for step in steps if step in self._before],
            [self._held[step] for step in steps if step in self._held],
        )

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong here is no failure of the watch, nor of the run."""
        try:
            yield
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._reason = f"{type(error).__name__}: {' '.join(str(error).split())}"

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        found = collective_of(func, args, kwargs)
        if found is None:
            self._live.add(func, result)
            return
        if _at_work and _at_work[-1] is not self:
            return
        name, inputs, outputs = found
        phase = BACKWARD if torch._C._current_graph_task_id() in self._tasks else self._phase
        elements = sum(tensor.numel() for tensor in inputs)
        dtype = inputs[0].dtype if inputs else torch.uint8
        kind = classify(name, elements, dtype, phase)
        if phase == ELSEWHERE and any(word in name for word in REDUCING):
            kind = GRADIENT if self._is_gradient(inputs) else CONTROL
        self._collectives.append(
            Collective(self._now, name, kind, phase, elements, dtype, bytes_of(inputs), bytes_of(outputs))
        )

    def _is_gradient(self, tensors: list[Tensor]) -> bool:
        """Of what a script reduces outside of backward and engine, however large: a loss, a count, or a gradient."""
        own = {p.grad.untyped_storage()._cdata for p in self._trained() if p.grad is not None}
        return any(tensor.untyped_storage()._cdata in own for tensor in tensors)
