"""BF16_Optimizer: ZeRO 1 in bf16 with gradients accumulated in fp32.

It partitions masters and states, but every rank keeps the whole gradient in fp32 all the time
(``fp32_groups_gradients_flat``), beside the one in bf16 that autograd makes.
"""

from __future__ import annotations

from dsaccum.planning.engines.engine import Engine
from dsaccum.planning.engines.layout import Layout, up_to_multiple

_FP32, _BF16 = 4, 2


class BF16Optimizer(Engine):
    """The whole gradient in fp32, masters and states of one partition."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._flat = up_to_multiple(layout.elements, 2 * layout.world_size)
        self._partition = self._flat // layout.world_size
        self._has_gradient: set[int] = set()
        self._use = layout.optimizer((self._partition,))
        self.ledger.take("parameters", _BF16 * self._flat)
        self.ledger.take("gradients", layout.accumulation_bytes * self._flat)
        self.ledger.take("optimizer", _FP32 * self._partition + self._use.states)

    def gradient(self, parameter: int) -> int:
        """In bf16; ``backward_prologue`` sets it to zero before the next micro-step, but keeps it."""
        if parameter in self._has_gradient:
            return 0
        self._has_gradient.add(parameter)
        return _BF16 * self.layout.trained[parameter]

    def finish(self) -> None:
        """``_update_hp_grad`` casts one gradient at a time; the all-reduce casts the whole one to its own type."""
        largest = max(self.layout.trained.values())
        with self.ledger.while_needed("buffers", self.layout.accumulation_bytes * largest):
            pass
        communicated = min(self.layout.communication_bytes(parameter) for parameter in self.layout.trained)
        if self.boundary and communicated != self.layout.accumulation_bytes:
            with self.ledger.while_needed("buffers", communicated * self._flat):
                pass

    def step(self) -> None:
        """The optimizer is given a view of the partition's gradient."""
        with self.ledger.while_needed("optimizer", self._use.temporary):
            pass
        for parameter in self._has_gradient:
            self.ledger.free("gradients", _BF16 * self.layout.trained[parameter])
        self._has_gradient.clear()
