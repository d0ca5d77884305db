"""The script's own calls of torch's gradient clipping, as they happen."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Listener = Callable[[list[Tensor], Callable[[], Any], float], Any]
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_installed = False


class ClipListener:
    """Told of each call while it is in use: before (with the parameters) and after (with norm and limit)."""

    def __init__(self, before: Callable[[list[Tensor]], None], after: Callable[[float, float], None]) -> None:
        self.before, self.after = before, after
        _install()
        _listeners.add(self)

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
            listener.before(tensors)
        norm = original(tensors, max_norm, *arguments, **keywords)
        for listener in listening:
            listener.after(float(norm), float(max_norm))
        return norm

    nn.utils.clip_grad_norm_ = clip_grad_norm_
    torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_


def listen_from_the_start() -> None:
    """Wrap the function before a script imports it by name."""
    _install()
