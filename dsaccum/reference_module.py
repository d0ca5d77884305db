"""A model that every pass finds as it was, without a copy of it for each: copies took half of a small verification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_Container = list[Any] | dict[Any, Any] | set[Any]


class ReferenceModule:
    """A module whose parameters, buffers and attributes are put back after each use.

    What a forward leaves behind (statistics, caches, counters, gradients) can reach no later pass, but for what it
    hides inside objects of its own: then the same batch has another loss the second time, and that is looked for.

    Args:
        module: nobody else's.
    """

    def __init__(self, module: nn.Module) -> None:
        module.zero_grad(set_to_none=True)
        self._module = module
        self.parameters = dict(module.named_parameters())
        """By name; tied ones are named once."""
        self.tensors: dict[str, Tensor] = {**dict(module.named_buffers()), **self.parameters}
        """Parameters and buffers, by name."""
        self._attributes = [(each, dict(vars(each))) for each in module.modules()]
        self._containers = [
            (value, value.copy())
            for _, attributes in self._attributes
            for value in attributes.values()
            if isinstance(value, list | dict | set)
        ]

    @contextmanager
    def at(self, values: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """Inside, the module has these parameters and buffers, and no gradients.

        Args:
            values: of all ``tensors``; they stay what they are.
        """
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(values[name])
        try:
            yield self._module
        finally:
            self._put_back()

    def _put_back(self) -> None:
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        for container, content in self._containers:
            container.clear()
            _fill(container, content)
        for parameter in self.parameters.values():
            parameter.grad = None


def _fill(container: _Container, content: _Container) -> None:
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)
