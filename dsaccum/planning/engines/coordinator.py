"""Which parameters ZeRO 3 has gathered when: ``PartitionedParameterCoordinator``, once its trace is complete.

A module's parameters are gathered before it runs, with those that come next as far as ``stage3_prefetch_bucket_size``
goes, and let go of after it, unless they come again within ``stage3_max_reuse_distance`` elements: a model of fewer
is gathered whole by the end of its forward pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

from dsaccum.planning.engines.layout import Layout, up_to_multiple
from dsaccum.planning.engines.ledger import Ledger


class _Handle:
    """Parameters gathered in one collective, into one flat tensor that lives until the last of them was waited for."""

    def __init__(self, parameters: Iterable[int]) -> None:
        self.parameters = set(parameters)
        self.unclaimed = set(self.parameters)
        self.flat = 0
        self.complete = False


class Coordinator:
    """Follows fetches and releases of one rank, and enters what is gathered into a ledger."""

    def __init__(self, layout: Layout, ledger: Ledger) -> None:
        self._layout, self._ledger = layout, ledger
        self._size = layout.trained
        self._persistent = {p for p, elements in self._size.items() if elements <= layout.persistence}
        self._available: set[int] = set()
        self._in_flight: dict[int, _Handle] = {}
        self._active: dict[int, set[int]] = {parameter: set() for parameter in self._size}
        self._running: list[int] = []
        self.gathered_bytes = 0
        """Of all collectives so far; the persistent parameters', before the first micro-step, are not counted."""
        self.gather_persistent()
        self.gathered_bytes = 0

    def _of(self, module: int) -> list[int]:
        return [parameter for parameter in self._layout.of_module.get(module, ()) if parameter in self._size]

    def begin(self, visits: Sequence[int]) -> None:
        """``reset_step``: the queue of what will be needed starts anew; what is gathered stays."""
        needed = [self._of(module) for module in visits]
        self._queue = deque((p, step) for step, parameters in enumerate(needed) for p in parameters)
        self._steps_of: dict[int, list[int]] = {parameter: [] for parameter in self._size}
        for parameter, step in self._queue:
            self._steps_of[parameter].append(step)
        self._elements_before = list(accumulate((sum(self._size[p] for p in each) for each in needed), initial=0))
        self._fetched_for = dict.fromkeys(self._size, -1)
        self._step = self._counted_available = 0

    def fetch(self, module: int) -> None:
        """``_fetch_sub_module_impl``."""
        wanted = self._of(module)
        self._gather([parameter for parameter in wanted if self._is_absent(parameter)])
        for parameter in wanted:
            self._active[parameter].add(module)
            if parameter in self._in_flight:
                self._wait(parameter)
        self._running.append(module)
        self._drop_from_queue({parameter for parameter in wanted if self._fetched_for[parameter] < self._step})
        self._prefetch()
        self._step += 1

    def _is_absent(self, parameter: int) -> bool:
        return parameter not in self._available and parameter not in self._in_flight

    def _drop_from_queue(self, parameters: set[int]) -> None:
        dropped: set[int] = set()
        while self._queue and len(dropped) < len(parameters):
            parameter, self._fetched_for[parameter] = self._queue.popleft()
            dropped.add(parameter)

    def _prefetch(self) -> None:
        room = min(self._layout.max_live - self._counted_available, self._layout.prefetch)
        chosen: list[int] = []
        elements = 0
        while self._queue and elements < room:
            parameter, step = self._queue.popleft()
            self._fetched_for[parameter] = max(self._fetched_for[parameter], step)
            if self._is_absent(parameter) and parameter not in chosen:
                chosen.append(parameter)
                elements += self._size[parameter]
        self._gather(chosen)

    def _gather(self, parameters: Sequence[int]) -> None:
        """``all_gather_coalesced``: several go through one flat tensor, by number format."""
        if not parameters:
            return
        self._counted_available += sum(self._size[parameter] for parameter in parameters)
        if self._layout.world_size == 1:  # parameters point to their only partition
            self._available.update(parameters)
            return
        for item in {self._layout.communication_bytes(parameter) for parameter in parameters}:
            handle = _Handle(p for p in parameters if self._layout.communication_bytes(p) == item)
            handle.flat = item * sum(up_to_multiple(self._size[p], self._layout.world_size) for p in handle.parameters)
            self._ledger.take("buffers", handle.flat)
            self.gathered_bytes += handle.flat
            self._in_flight |= dict.fromkeys(handle.parameters, handle)

    def _wait(self, parameter: int) -> None:
        handle = self._in_flight.pop(parameter)
        if not handle.complete:
            handle.complete = True
            if len(handle.parameters) == 1 and self._layout.communication_bytes(parameter) == self._layout.weight_bytes:
                self._ledger.free("buffers", handle.flat)  # the flat tensor becomes the parameter
                handle.flat = 0
            for each in handle.parameters:
                self._ledger.take("parameters", self._bytes(each))
            self._available |= handle.parameters
        handle.unclaimed.discard(parameter)
        if not handle.unclaimed:
            self._ledger.free("buffers", handle.flat)

    def _bytes(self, parameter: int) -> int:
        return self._layout.weight_bytes * self._size[parameter]

    def release(self, module: int) -> None:
        """``release_sub_module``: the first time after each fetch; a module may tell its end more than once."""
        if module not in self._running:
            return
        self._running.remove(module)
        candidates = {p for p in self._of(module) if p not in self._persistent and self._fetched_for[p] <= self._step}
        for parameter in self._of(module):
            self._active[parameter].discard(module)
        for parameter in candidates:
            if not self._is_needed_soon(parameter):
                self._release(parameter)

    def _is_needed_soon(self, parameter: int) -> bool:
        """Whether fewer than ``stage3_max_reuse_distance`` elements come before it comes again."""
        steps = self._steps_of[parameter]
        place = bisect_left(steps, self._step)
        if place == len(steps):
            return False
        passed = self._elements_before[steps[place]] - self._elements_before[self._step]
        return passed < self._layout.max_reuse

    def _release(self, parameter: int) -> None:
        if parameter in self._available and not self._active[parameter]:
            self._available.discard(parameter)
            self._counted_available -= self._size[parameter]
            if self._layout.world_size > 1:
                self._ledger.free("parameters", self._bytes(parameter))

    def release_leftovers(self) -> None:
        """``release_backward_leftovers``: embeddings, whose inputs have no gradient."""
        for module in list(self._running):
            self._running.remove(module)
            for parameter in self._of(module):
                self._active[parameter].discard(module)
                if parameter not in self._persistent:
                    self._release(parameter)

    def release_all(self) -> None:
        """``release_and_reset_all``: before the optimizer step."""
        for parameter in list(self._in_flight):
            self._wait(parameter)
        for parameter in list(self._available):
            self._active[parameter].clear()
            self._release(parameter)

    def gather_persistent(self) -> None:
        """``_post_step``: parameters below ``stage3_param_persistence_threshold`` are always gathered in between."""
        for parameter in self._persistent - self._available:
            self._available.add(parameter)
            if self._layout.world_size > 1:
                self._ledger.take("parameters", self._bytes(parameter))
