"""What a forward takes and gives, as nested structures of tensors: copied, converted, and tapped."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

OnTensor = Callable[[str, Tensor], Tensor]


def tapped(output: Any, tap: OnTensor) -> Any:
    """An output with every tensor that a gradient can arrive at replaced by ``tap(path, tensor)``.

    Dicts, lists and dataclasses are changed in place, so that they stay what they are; tuples are made anew. One tensor
    in two places stays one.
    """
    return _walked(output, "", _Once(tap))


def leaves(output: Any) -> dict[str, Tensor]:
    """The same tensors by path: ``loss``, ``logits``, ``hidden_states.2``; a bare tensor's path is empty."""
    found: dict[str, Tensor] = {}

    def note(path: str, tensor: Tensor) -> Tensor:
        found[path] = tensor
        return tensor

    _walked(output, "", note)
    return found


def copied(value: Any) -> Any:
    """Inputs of a forward as they are now: a loop may change its batch in place."""
    return _mapped(value, lambda tensor: tensor.detach().clone())


def converted(value: Any, dtype: torch.dtype | None) -> Any:
    """A fresh copy with floating tensors in ``dtype``; None leaves each as it is."""

    def convert(tensor: Tensor) -> Tensor:
        return tensor.clone() if dtype is None or not tensor.is_floating_point() else tensor.to(dtype, copy=True)

    return _mapped(value, convert)


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a nested structure, with their paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors_in(each, _under(path, key))
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from tensors_in(each, _under(path, place))


class _Once:
    """The same answer for the same tensor."""

    def __init__(self, tap: OnTensor) -> None:
        self._tap = tap
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, path: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = tensor, self._tap(path, tensor)
        return self._known[id(tensor)][1]


def _walked(value: Any, path: str, tap: OnTensor) -> Any:
    if isinstance(value, Tensor):
        return tap(path, value) if value.requires_grad and value.is_floating_point() else value
    if isinstance(value, dict):
        for key, each in list(value.items()):
            new = _walked(each, _under(path, key), tap)
            if new is not each:
                value[key] = new
        return value
    if isinstance(value, list):
        for place, each in enumerate(value):
            value[place] = _walked(each, _under(path, place), tap)
        return value
    if isinstance(value, tuple):
        new = [_walked(each, _under(path, place), tap) for place, each in enumerate(value)]
        if all(one is other for one, other in zip(new, value, strict=True)):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            each = getattr(value, entry.name, None)
            new = _walked(each, _under(path, entry.name), tap)
            if new is not each:
                setattr(value, entry.name, new)
    return value


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return (
            {key: _mapped(each, change) for key, each in value.items()} if type(value) is dict else _same(value, change)
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(each, change) for each in value))
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, change) for each in value)
    return value


def _same(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    new = copy.copy(value)
    for key, each in value.items():
        new[key] = _mapped(each, change)
    return new


def _under(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
