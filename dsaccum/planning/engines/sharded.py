"""ZeRO 3: ``DeepSpeedZeroOptimizer_Stage3``. Parameters, gradients, masters and states are all partitioned.

Each parameter by itself, up to a multiple of W elements. Two things are larger than the papers say: masters are a
copy in fp32 training too (a device is compared with its name, which is never equal), and the optimizer step flattens
a sub-group's gradient into another copy beside ``grad_partitions_flat_buffer``.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsaccum.planning.engines.coordinator import Coordinator
from dsaccum.planning.engines.engine import Engine
from dsaccum.planning.engines.layout import ITEM_SIZES, Layout, up_to_multiple

_FP32, _NORM = 4, 8
"""Bytes; norms are taken in float64 (``get_norm_dtype``), one tensor at a time."""


class Sharded(Engine):
    """Everything partitioned; modules gather their parameters when they run."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._shard = {p: up_to_multiple(n, layout.world_size) // layout.world_size for p, n in layout.trained.items()}
        shards = sum(self._shard.values())
        self._groups = _sub_groups(list(self._shard.values()), layout.sub_group)
        self._uses = [layout.optimizer((sum(group),)) for group in self._groups]
        self._waiting: dict[str, list[int]] = {layout.communication[p]: [] for p in layout.trained}
        self._whole: set[int] = set()
        self.ledger.take("parameters", layout.weight_bytes * shards)
        self.ledger.take("gradients", layout.accumulation_bytes * shards)
        self.ledger.take("optimizer", _FP32 * shards + sum(use.states for use in self._uses))
        self.ledger.take("buffers", sum(layout.reduce_bucket * ITEM_SIZES[each] for each in self._waiting))
        self._coordinator = Coordinator(layout, self.ledger)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of parameters gathered so far."""
        return self._coordinator.gathered_bytes

    def begin(self, visits: Sequence[int], *, boundary: bool) -> None:
        """``reset_step``."""
        super().begin(visits, boundary=boundary)
        self._coordinator.begin(visits)

    def enter(self, module: int) -> None:
        """Gather its parameters, and those that come next."""
        self._coordinator.fetch(module)

    def leave(self, module: int) -> None:
        """Let them go unless they are needed again soon."""
        self._coordinator.release(module)

    def gradient(self, parameter: int) -> int:
        """``reduce_independent_p_g_buckets_and_remove_grads``: a gradient that fits moves into the bucket."""
        communication, elements = self.layout.communication[parameter], self.layout.trained[parameter]
        waiting = self._waiting[communication]
        if waiting and self._elements(waiting) + elements > self.layout.reduce_bucket:
            self._reduce(communication)
        fits = self._elements(self._waiting[communication]) + elements <= self.layout.reduce_bucket
        self._waiting[communication].append(parameter)
        if fits:
            return 0
        self._whole.add(parameter)
        return elements * self.layout.weight_bytes

    def _elements(self, parameters: list[int]) -> int:
        return sum(self.layout.trained[parameter] for parameter in parameters)

    def _reduce(self, communication: str) -> None:
        """``__avg_scatter_grads``: cast, copied once more in the ranks' order, the result cast to the sum's type."""
        parameters, self._waiting[communication] = self._waiting[communication], []
        if not parameters:
            return
        item = ITEM_SIZES[communication]
        cast = self._elements(parameters) * item if communication != self.layout.precision else 0
        alone = len(parameters) == 1 and self.layout.trained[parameters[0]] % self.layout.world_size == 0
        shards = sum(self._shard[parameter] for parameter in parameters)
        interleaved = 0 if alone or not self.layout.scatters else shards * self.layout.world_size * item
        summed = shards * self.layout.accumulation_bytes if communication != self.layout.accumulation else 0
        with self.ledger.while_needed("buffers", cast + interleaved + summed):
            pass
        for parameter in self._whole.intersection(parameters):
            self._whole.discard(parameter)
            self.ledger.free("gradients", self.layout.trained[parameter] * self.layout.weight_bytes)

    def finish(self) -> None:
        """What is left in the buckets, and modules whose end the backward pass does not tell."""
        for communication in self._waiting:
            self._reduce(communication)
        self._coordinator.release_leftovers()

    def step(self) -> None:
        """Norms, then sub-group by sub-group: its gradient flat and in fp32, the optimizer on it."""
        self._coordinator.release_all()
        with self.ledger.while_needed("buffers", _NORM * max(self._shard.values())):
            pass
        for group, use in zip(self._groups, self._uses, strict=True):
            elements = sum(group)
            flat = elements * self.layout.accumulation_bytes if len(group) > 1 else 0
            other = elements * _FP32 if self.layout.accumulation_bytes != _FP32 else 0
            with self.ledger.while_needed("buffers", flat + other):
                pass
            with (
                self.ledger.while_needed("gradients", other or flat),
                self.ledger.while_needed("optimizer", use.temporary),
            ):
                pass
        self._coordinator.gather_persistent()


def _sub_groups(shards: list[int], limit: int) -> list[list[int]]:
    """``_create_fp16_sub_groups``: one is closed by the parameter that takes it to the limit."""
    if limit >= sum(shards):
        return [shards]
    groups: list[list[int]] = [[]]
    for shard in shards:
        groups[-1].append(shard)
        if sum(groups[-1]) >= limit:
            groups.append([])
    return [group for group in groups if group]
