"""What a forward takes and gives, as nested structures of tensors: found, copied, converted."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def leaves(output: Any) -> dict[str, Tensor]:
    """Every tensor that a gradient can arrive at, once, by path: ``loss``, ``hidden_states.2``; "" for a bare one."""
    found: dict[str, Tensor] = {}
    known: set[int] = set()
    for path, tensor in tensors_in(output):
        if tensor.requires_grad and tensor.is_floating_point() and id(tensor) not in known:
            known.add(id(tensor))
            found[path] = tensor
    return found


def copied(value: Any) -> Any:
    """Inputs of a forward as they are now: a loop may change its batch in place.

    Raises:
        ValueError: one of them can be used only once.
    """
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
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name, None), _under(path, entry.name))


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
    return _copied_object(value)


def _copied_object(value: Any) -> Any:
    """A cache or a generator, which a forward changes; what can't be copied is passed on as it is."""
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value)
    except Exception as error:
        if isinstance(value, Iterator):
            raise ValueError("a forward is given an iterator, which can be gone through only once") from error
        return value


def _same(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    new = copy.copy(value)
    for key, each in value.items():
        new[key] = _mapped(each, change)
    return new


def _under(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
