"""Which parameter a fault takes where it takes one: the same for every rank and every run."""

from __future__ import annotations

from typing import Any


def middle_parameter(module: Any) -> tuple[str, Any]:
    """The trained parameter of median size: neither an embedding nor, in most models, a norm."""
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    trained.sort(key=lambda named: getattr(named[1], "ds_numel", named[1].numel()))  # ZeRO 3 keeps the whole size there
    return trained[len(trained) // 2]
