"""How many bytes of tensors are alive that operations made: no allocator's figure, and so the same on any device.

What no operation of torch made (a batch from numpy, a parameter) is not counted, nor what only looks at it.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


class LiveStorages:
    """Storages of the results of operations, held weakly: torch frees each when it would."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, operation: Any, result: Any) -> None:
        """Take in an operation's result, any nesting of tensors, unless it is a view or was made in place."""
        if any(given.alias_info is not None for given in operation._schema.returns):
            return
        for tensor in tree_leaves(result):
            if not isinstance(tensor, Tensor) or tensor.device.type == "meta":
                continue
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # a subclass that has none
                continue
            key = storage._cdata
            known = self._known.get(key)
            if known is None or known() is None:  # a freed one's place may be taken by another
                self._known[key] = weakref.ref(storage)

    def bytes(self) -> int:
        """Of all that are alive now, each as large as it is now: ZeRO and FSDP resize theirs."""
        alive = {key: storage for key, known in self._known.items() if (storage := known()) is not None}
        self._known = {key: self._known[key] for key in alive}
        return sum(int(storage.nbytes()) for storage in alive.values())

    def bytes_at_rest(self, expected: int) -> int:
        """The same; where it is more than expected, without what only reference cycles hold."""
        now = self.bytes()
        if now > expected:
            gc.collect()
            now = self.bytes()
        return now
