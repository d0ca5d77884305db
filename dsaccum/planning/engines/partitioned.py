"""ZeRO 1 and 2: ``DeepSpeedZeroOptimizer``. Parameters are whole and flat, masters and states partitioned.

Gradients on their way to a reduction lie in a bucket of ``reduce_bucket_size`` elements, made whole whatever the
model's size: 5e8 elements by default, 1.9 GB in fp32. ZeRO 1 keeps it from a window's first backward pass to the
boundary, ZeRO 2 during each backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dsaccum.planning.engines.engine import Engine
from dsaccum.planning.engines.layout import ITEM_SIZES, Layout, up_to_multiple

_FP32, _NORM = 4, 8
"""Bytes; norms are taken in float64 (``get_norm_dtype``), one tensor at a time."""


@dataclass
class _Bucket:
    """Gradients that wait for one reduction in one number format."""

    parameters: list[int] = field(default_factory=list)
    elements: int = 0


class Partitioned(Engine):
    """ZeRO 1 where gradients are not partitioned, ZeRO 2 where they are."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._partitions = Partitions.of(layout)
        self._use = layout.optimizer((self._partitions.size,))
        self.ledger.take("parameters", layout.weight_bytes * self._partitions.flat)
        self.ledger.take("optimizer", _FP32 * self._partitions.size + self._use.states)
        self._gradient_partitioned = layout.stage == 2
        # fp32 sums of half-precision gradients are one flat partition (_use_compact_grad_partition_buffer).
        separate = layout.accumulation != layout.precision
        self._compact = separate and layout.accumulation == "fp32"
        self._summed_bytes = layout.accumulation_bytes if separate and layout.stage == 1 else layout.weight_bytes
        self._buckets = {layout.communication[parameter]: _Bucket() for parameter in layout.trained}
        self._bucket_made = False
        self._whole: set[int] = set()
        """Parameters whose gradient stands in a tensor of its own."""
        self._own_copy = self._accumulated = 0

    def gradient(self, parameter: int) -> int:
        """``process_gradients``: ZeRO 2 reduces at every micro-step, ZeRO 1 after the boundary's backward pass."""
        self._make_bucket()
        new = parameter not in self._whole
        if new and self._summed_bytes != self.layout.weight_bytes:  # grad_accum, cast from the gradient
            self._whole.add(parameter)
            self.ledger.take("gradients", self._summed_bytes * self.layout.trained[parameter])
        if self._gradient_partitioned or (self.layout.overlaps and self.boundary):
            self._put_into_bucket(parameter)
            if self.layout.trained[parameter] <= self.layout.reduce_bucket:
                return 0
        if not new or parameter in self._whole:
            return 0
        self._whole.add(parameter)
        return self.layout.weight_bytes * self.layout.trained[parameter]

    def _make_bucket(self) -> None:
        if not self._bucket_made:
            self._bucket_made = True
            self.ledger.take("buffers", self._bucket_bytes())

    def _bucket_bytes(self) -> int:
        """One for each format that gradients are reduced in, each in the gradient's own; two of each to overlap."""
        copies = len(self._buckets) * (2 if self.layout.overlaps else 1)
        return copies * self.layout.reduce_bucket * self._summed_bytes

    def finish(self) -> None:
        """``reduce_gradients`` and ``independent_gradient_partition_epilogue``."""
        if not self.boundary and not self._gradient_partitioned:
            return
        self._make_bucket()
        if not self._gradient_partitioned and not self.layout.overlaps:
            for parameter in self.layout.trained:
                if parameter in self._whole:
                    self._put_into_bucket(parameter)
        for communication in self._buckets:
            self._reduce(communication)
        self._keep_sum()
        self.ledger.free("buffers", self._bucket_bytes())
        self._bucket_made = False
        for parameter in self._whole:  # those of other partitions that were too large for the bucket
            self.ledger.free("gradients", self._summed_bytes * self.layout.trained[parameter])
        self._whole.clear()

    def _put_into_bucket(self, parameter: int) -> None:
        """``reduce_independent_p_g_buckets_and_remove_grads``: the bucket takes the gradient's place if it has room."""
        communication, elements = self.layout.communication[parameter], self.layout.trained[parameter]
        bucket = self._buckets[communication]
        if bucket.elements + elements > self.layout.reduce_bucket:
            self._reduce(communication)
        if elements <= self.layout.reduce_bucket:
            self._release(parameter)
        bucket.parameters.append(parameter)
        bucket.elements += elements

    def _release(self, parameter: int) -> None:
        if parameter in self._whole:
            self._whole.discard(parameter)
            self.ledger.free("gradients", self._summed_bytes * self.layout.trained[parameter])

    def _reduce(self, communication: str) -> None:
        bucket = self._buckets[communication]
        if not bucket.parameters:
            return
        with self.ledger.while_needed("buffers", self._flattened_bytes(bucket, communication)):
            if self._compact:
                self._take_compact_partition(bucket)
        if not self._compact:
            self._copy_own(bucket)
        for parameter in bucket.parameters:
            if self._gradient_partitioned or parameter in self._partitions.own:
                self._release(parameter)
        bucket.parameters, bucket.elements = [], 0

    def _flattened_bytes(self, bucket: _Bucket, communication: str) -> int:
        """``allreduce_bucket`` copies where a bucket falls into several pieces, and again to another format."""
        if not self.layout.scatters:
            pieces = 1
        elif self._compact:
            pieces = len(bucket.parameters)
        else:
            pieces = self._partitions.pieces(bucket.parameters)
        copy = bucket.elements * self._summed_bytes if pieces > 1 else 0
        other = ITEM_SIZES[communication] != self._summed_bytes
        return copy + (bucket.elements * ITEM_SIZES[communication] if other else 0)

    def _take_compact_partition(self, bucket: _Bucket) -> None:
        own = [parameter for parameter in bucket.parameters if parameter in self._partitions.own]
        if own:  # source.to(output.dtype)
            self._make_compact_partition()
            with self.ledger.while_needed("buffers", _FP32 * max(self._partitions.own[p] for p in own)):
                pass

    def _make_compact_partition(self) -> None:
        if not self._accumulated:
            self._accumulated = _FP32 * self._partitions.size
            self.ledger.take("gradients", self._accumulated)

    def _copy_own(self, bucket: _Bucket) -> None:
        """``copy_grads_in_partition`` makes room for all parameters that touch the partition, whole."""
        if not self._own_copy and any(parameter in self._partitions.own for parameter in bucket.parameters):
            self._own_copy = self.layout.weight_bytes * self._partitions.touched
            self.ledger.take("gradients", self._own_copy)

    def _keep_sum(self) -> None:
        """The first micro-step's copy becomes the sum; later ones are added to it and let go of."""
        if self._compact:
            self._make_compact_partition()
            return
        if self._accumulated:
            self.ledger.free("gradients", self._own_copy)
        else:
            self._accumulated = self._own_copy
        self._own_copy = 0

    def step(self) -> None:
        """Norms, the partition's gradient flat and in fp32, the optimizer on it."""
        size = self._partitions.size
        largest = max(self._partitions.own.values(), default=0)
        with self.ledger.while_needed("buffers", _NORM * largest):
            pass
        if not self._compact:
            flat = size * self.layout.weight_bytes
            self.ledger.take("buffers", flat)
            if self.layout.weight_bytes != _FP32:
                self.ledger.take("buffers", _FP32 * size)
                self.ledger.free("buffers", flat)
            self.ledger.free("gradients", self._accumulated)
            self.ledger.free("buffers", _FP32 * size)
            self.ledger.take("gradients", _FP32 * size)
        with self.ledger.while_needed("optimizer", self._use.temporary):
            pass
        self.ledger.free("gradients", _FP32 * size)
        self._accumulated = 0


@dataclass(frozen=True)
class Partitions:
    """How the flat parameters fall into W partitions.

    Attributes:
        size: elements of one.
        flat: elements of all.
        own: elements in this rank's partition of each parameter that touches it.
        touched: elements of those parameters, whole.
        owners: first and last rank of each parameter.
    """

    size: int
    flat: int
    own: dict[int, int]
    touched: int
    owners: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, layout: Layout) -> Partitions:
        """Equal partitions of the parameters in a row, padded to a multiple of 2 W."""
        flat = up_to_multiple(layout.elements, 2 * layout.world_size)
        size = flat // layout.world_size
        own, owners, start = {}, {}, 0
        for parameter, elements in layout.trained.items():
            end = start + elements
            owners[parameter] = start // size, (end - 1) // size
            inside = min(end, (layout.rank + 1) * size) - max(start, layout.rank * size)
            if inside > 0:
                own[parameter] = inside
            start = end
        touched = sum(layout.trained[parameter] for parameter in own)
        return cls(size, flat, own, touched, owners)

    @classmethod
    def of_all(cls, layout: Layout) -> Iterator[Partitions]:
        """The same as each rank sees it."""
        for rank in range(layout.world_size):
            yield cls.of(replace(layout, rank=rank))

    def pieces(self, parameters: list[int]) -> int:
        """Runs of gradient with one owner, in the order in which they lie in a bucket."""
        count, before = 0, -1
        for parameter in parameters:
            first, last = self.owners[parameter]
            count += last - first + (first != before)
            before = last
        return count
