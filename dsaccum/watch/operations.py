"""Every operation of torch in a window, as it happens on this thread and in its backward passes: seen, and left alone.

One ``TorchDispatchMode`` for all who look. It begins in one call of the script's and ends in another, so that ``with``
won't do. It is put on only where it can be taken off again: nobody else's mode is in force, and no backward pass is
under way (whose end would put it back on). Someone else's mode that is still open at the end stays open.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

See = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Is given an operation, its arguments, and its result."""


class OperationWatch:
    """Sees each operation that is the run's own, from now on.

    Args:
        see: told of it.
        on_failure: told when that fails; nothing more is seen then.

    Attributes:
        reason: why nothing is seen; None where all is well.
    """

    def __init__(self, see: See, on_failure: Callable[[Exception], None]) -> None:
        self._see, self._failed = see, on_failure
        self.reason = _mode.enter(self)

    def tell(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """What fails here is no failure of the run."""
        try:
            self._see(func, args, kwargs, result)
        except Exception as error:
            self.stop()
            self._failed(error)

    def stop(self) -> None:
        """See no more. In a backward pass, and in ``see``, the mode itself waits for another call to be taken off."""
        _mode.leave(self)


@contextmanager
def aside() -> Iterator[None]:
    """Inside, operations are the watch's own, and nobody is told."""
    _mode.paused += 1
    try:
        yield
    finally:
        _mode.paused -= 1


class _Mode(TorchDispatchMode):
    """Passes everything on unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = 0
        self._watches: list[OperationWatch] = []
        self._on = self._in_forks = self._telling = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What ``torch.compile`` has compiled stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused:
            self._telling = True
            for watch in list(self._watches):
                watch.tell(func, args, kwargs or {}, result)
            self._telling = False
        return result

    def enter(self, watch: OperationWatch) -> str | None:
        """Tell this one, too; else the reason why not."""
        if not self._on:
            if (obstacle := _obstacle()) is not None:
                return obstacle
            if not self._in_forks:
                # Workers of a data loader that start within a window have nothing that is to be seen.
                os.register_at_fork(after_in_child=self._take_off)
            self._on = self._in_forks = True
            torch._C._push_on_torch_dispatch_stack(self)  # ``with`` also sets flags, which others may save meanwhile
        self._watches.append(watch)
        return None

    def leave(self, watch: OperationWatch) -> None:
        """Tell it no more; with nobody left, nothing stays on the run."""
        self._watches = [each for each in self._watches if each is not watch]
        within = self._telling or torch._C._current_graph_task_id() != -1  # whose end would put it back on
        if not self._watches and not within:
            self._take_off()

    def _take_off(self) -> None:
        above: list[Any] = []
        while self._on and _len_torch_dispatch_stack():
            top = torch._C._pop_torch_dispatch_stack(None)
            if top is self:
                break
            above.append(top)
        for mode in reversed(above):
            torch._C._push_on_torch_dispatch_stack(mode)
        self._on, self._watches = False, []


_mode = _Mode()


def _obstacle() -> str | None:
    if _len_torch_dispatch_stack():
        return "another TorchDispatchMode is in force when the window begins"
    if torch._C._current_graph_task_id() != -1:
        return "the optimizer steps within a backward pass"
    if not hasattr(TorchDispatchMode, "ignore_compile_internals") and _has_compiled():
        return "this version of torch would not run what it has compiled"
    return None


def _has_compiled() -> bool:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters and counters["frames"])
