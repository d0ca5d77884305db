"""Steps of torch's ``GradScaler``, which steps no optimizer where a gradient is not finite."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler

_listeners: weakref.WeakSet[ScalerListener] = weakref.WeakSet()
_step = GradScaler.step


class ScalerListener:
    """Told of each call of ``GradScaler.step``, before and after it, with the optimizer.

    Args:
        before: must not raise; likewise
        after: which is not called where the step raises.
    """

    def __init__(self, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
        self.before, self.after = before, after
        _listeners.add(self)
        GradScaler.step = _told_step  # type: ignore[method-assign]

    def stop(self) -> None:
        """No more."""
        _listeners.discard(self)
        if not _listeners and GradScaler.step is _told_step:
            GradScaler.step = _step  # type: ignore[method-assign]


@functools.wraps(_step)
def _told_step(self: GradScaler, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
    listening = list(_listeners)
    for listener in listening:
        listener.before(optimizer)
    result = _step(self, optimizer, *arguments, **keywords)
    for listener in listening:
        listener.after(optimizer)
    return result
