"""Which parameters a fault takes where it takes some: the same for every rank and every run."""

from __future__ import annotations

from typing import Any

from torch import nn


def middle_parameter(module: Any) -> tuple[str, Any]:
    """The trained parameter of median size: neither an embedding nor, in most models, a norm."""
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    trained.sort(key=lambda named: getattr(named[1], "ds_numel", named[1].numel()))  # ZeRO 3 keeps the whole size there
    return trained[len(trained) // 2]


def tied_parameters(module: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several -> the first one."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]}
