"""ZeRO 0: every rank holds everything. Three wrappers: none, FP16_UnfusedOptimizer, FP16_Optimizer.

The names are misleading: the last two are also what bf16 gets (``DeepSpeedEngine._configure_fp16_optimizer``).
"""

from __future__ import annotations

from dsaccum.planning.engines.engine import Engine
from dsaccum.planning.engines.layout import Layout

_ALL_REDUCE_BUCKET = 500_000_000
"""Elements; ``MEMORY_OPT_ALLREDUCE_SIZE`` of DeepSpeed's engine, not configurable."""
_FP32 = 4


class Unpartitioned(Engine):
    """fp32 and autocast: the optimizer steps the model's own parameters."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.sizes = tuple(layout.trained.values())
        self.ledger.take("parameters", layout.elements * layout.weight_bytes)
        self.use = layout.optimizer(self._stepped())
        self.ledger.take("optimizer", self.use.states)
        self._has_gradient: set[int] = set()

    def _stepped(self) -> tuple[int, ...]:
        """Elements of the tensors that the optimizer steps."""
        return self.sizes

    def gradient(self, parameter: int) -> int:
        """It stays in ``parameter.grad``; later ones are added to it in place."""
        if parameter in self._has_gradient:
            return 0
        self._has_gradient.add(parameter)
        return self.layout.trained[parameter] * self.layout.weight_bytes

    def finish(self) -> None:
        """``allreduce_bucket`` flattens each bucket into a copy, with one rank too. A single tensor is not copied."""
        if self.boundary:
            for bucket in _all_reduce_buckets(self.sizes):
                copied = sum(bucket) if len(bucket) > 1 else 0
                with self.ledger.while_needed("buffers", copied * self.layout.weight_bytes):
                    pass

    def step(self) -> None:
        """Clipping works in place and takes norms of single tensors."""
        with self.ledger.while_needed("optimizer", self.use.temporary):
            pass
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        self.ledger.free("gradients", self.ledger.held["gradients"])
        self._has_gradient.clear()


class HalfUnfused(Unpartitioned):
    """bf16 and fp16 with an optimizer of torch: a master of each parameter, and fp32 gradients made at the step."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self.ledger.take("optimizer", _FP32 * layout.elements)

    def step(self) -> None:
        """``FP16_UnfusedOptimizer.step``: norms in fp32, then a whole fp32 gradient beside the half one."""
        with self.ledger.while_needed("buffers", _FP32 * max(self.sizes)):
            pass
        with (
            self.ledger.while_needed("gradients", _FP32 * self.layout.elements),
            self.ledger.while_needed("optimizer", self.use.temporary),
        ):
            pass
        self._clear_gradients()


class HalfFused(HalfUnfused):
    """bf16 with FusedAdam: masters are one flat tensor."""

    def _stepped(self) -> tuple[int, ...]:
        return (self.layout.elements,)

    def step(self) -> None:
        """``FP16_Optimizer.step``: gradients in fp32 one by one, flattened into a second copy, then let go of."""
        whole = _FP32 * self.layout.elements
        with self.ledger.while_needed("buffers", whole):
            self.ledger.take("gradients", whole)
        self._clear_gradients()
        with self.ledger.while_needed("gradients", whole), self.ledger.while_needed("optimizer", self.use.temporary):
            pass


def _all_reduce_buckets(sizes: tuple[int, ...]) -> list[list[int]]:
    """``allreduce_no_retain``: a bucket is closed by the tensor that takes it over the limit."""
    buckets: list[list[int]] = [[]]
    for size in sizes:
        buckets[-1].append(size)
        if sum(buckets[-1]) > _ALL_REDUCE_BUCKET:
            buckets.append([])
    return [bucket for bucket in buckets if bucket]
