"""The script's own calls of torch's gradient clipping, as they happen."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_listeners: weakref.WeakSet[ClipListener] = weakref.WeakSet()
_installed = False


class ClipListener:
    """Told of each call while it is in use: before (with the parameters) and after (with norm and limit)."""

    def __init__(
        self,
        before: Callable[[list[Tensor]], None],
        after: Callable[[Any, float], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.before, self.after, self._failed = before, after, on_failure
        _install()
        _listeners.add(self)

    def told(self, tell: Callable[[], None]) -> None:
        """What goes wrong in a listener is its own affair."""
        try:
            tell()
        except Exception as error:
            self._failed(error)

    def stop(self) -> None:
        """No more."""
        _listeners.discard(self)


def _install() -> None:
    """Wrap the function under both of its names, once; called before the script imports it, if all is well."""
    global _installed
    if _installed:
        return
    _installed = True
    original = nn.utils.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, max_norm: float, *arguments: Any, **keywords: Any) -> Any:
        if not _listeners:
            return original(parameters, max_norm, *arguments, **keywords)
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        listening = list(_listeners)
        for listener in listening:
            listener.told(partial(listener.before, tensors))
        norm = original(tensors, max_norm, *arguments, **keywords)
        for listener in listening:
            listener.told(partial(_after, listener, norm, max_norm))
        return norm

    nn.utils.clip_grad_norm_ = clip_grad_norm_
    torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_


def _after(listener: ClipListener, norm: Any, limit: Any) -> None:
    sharded = hasattr(norm, "full_tensor")  # a part of it on each rank, some of whom may not be listening
    listener.after(norm if sharded else float(norm), float(limit))


def listen_from_the_start() -> None:
    """Wrap the function before a script imports it by name."""
    _install()
