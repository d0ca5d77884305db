"""A copy of the user's module that costs nothing until it is needed: its structure, without the parameters' values.

Taken before ``deepspeed.initialize`` hangs anything on the module; filled in after a window with the values that the
forward used in it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsaccum.watch.fsdp import put_former_parts


class CannotCopy(Exception):
    """The module can't be copied or computed again; the message says why."""


class Skeleton:
    """A module's structure and buffers.

    Raises:
        CannotCopy: something in it can't be copied, or has numbers that are not judged.
    """

    def __init__(self, module: nn.Module) -> None:
        if any(parameter.is_complex() for parameter in module.parameters()):
            raise CannotCopy("parameters that are complex numbers")
        if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
            raise CannotCopy("a module of TorchScript, where nothing can be seen")
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        empty = {id(parameter): _without_values(parameter) for parameter in module.parameters()}
        self._empty = {self._names[key]: parameter for key, parameter in empty.items()}
        self._hooks = {name: list((p._backward_hooks or {}).values()) for name, p in module.named_parameters()}
        memo: dict[int, Any] = dict(empty)
        try:
            put_former_parts(module, memo)
            self._module = copy.deepcopy(module, memo)
        except Exception as error:
            raise CannotCopy(f"its module can't be copied ({type(error).__name__}: {error})") from error
        self.has_buffers = any(True for _ in module.buffers())

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(parameter.numel() for parameter in self._empty.values())

    def filled(
        self, values: Mapping[str, Tensor], trained: Sequence[str], dtype: torch.dtype | None, device: torch.device
    ) -> nn.Module:
        """A module of its own with these values.

        Args:
            values: every parameter by name, as the forward used it.
            trained: names of those that get a gradient.
            dtype: of all floating parameters and buffers; None for the values' own.
            device: where to.
        """
        memo: dict[int, Any] = {}
        for name, empty in self._empty.items():
            value = values[name].detach().to(device, dtype or values[name].dtype, copy=True).reshape(empty.shape)
            own = nn.Parameter(value, requires_grad=name in trained and value.is_floating_point())
            for hook in self._hooks[name] if own.requires_grad else []:  # it may mask what is not to be trained
                own.register_hook(hook)
            memo[id(empty)] = own
        module: nn.Module = copy.deepcopy(self._module, memo)
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)
        return module


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers, those that aren't saved included."""
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def set_buffers(module: nn.Module, values: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Make the module's buffers these."""
    owners = dict(module.named_modules())
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        kind = dtype if dtype is not None and value.is_floating_point() else value.dtype
        if path in owners and last in owners[path]._buffers:
            owners[path]._buffers[last] = value.to(kind, copy=True)


def modes_of(module: nn.Module) -> list[bool]:
    """``training`` of every part."""
    return [part.training for part in module.modules()]


def set_modes(module: nn.Module, modes: Sequence[bool]) -> None:
    """The same on a copy."""
    for part, training in zip(module.modules(), modes, strict=False):
        part.training = training


def _without_values(parameter: nn.Parameter) -> nn.Parameter:
    shape = getattr(parameter, "ds_shape", parameter.shape)
    empty = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)
