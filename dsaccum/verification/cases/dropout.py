"""Dropout set to 0, on both sides: masks depend on how a batch is split, so with dropout no split equals another."""

from __future__ import annotations

from torch import nn

_RATES = ("dropout", "drop_rate", "pdrop", "drop_path")
"""Models keep rates for attention as plain numbers, under names that contain one of these."""


def remove_dropout(model: nn.Module) -> list[str]:
    """Set every dropout rate of a model to 0, in place; returns the names of those that weren't."""
    changed = []
    for path, module in model.named_modules():
        rates = [name for name, value in vars(module).items() if isinstance(value, float) and _is_rate(module, name)]
        for name in rates:
            if getattr(module, name) > 0:
                setattr(module, name, 0.0)
                changed.append(f"{path}.{name}".lstrip("."))
    return changed


def _is_rate(module: nn.Module, name: str) -> bool:
    if name == "p":
        return isinstance(module, nn.modules.dropout._DropoutNd)
    return any(word in name.lower() for word in _RATES)
