"""Tied weights that the run trains as two: found by name, and their gradients put together again for comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn


def split_ties(model: nn.Module, trained: Sequence[str]) -> dict[str, str]:
    """Parameters that the run trains and the model has only as another name -> the name it has them under.

    Args:
        model: the verified one.
        trained: names of what the run trains.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {name: every[name] for name in trained if name in every and every[name] != name}


def joined(gradient: Mapping[str, Tensor | None], split: Mapping[str, str]) -> dict[str, Tensor | None]:
    """The gradient that the tied parameters have together, under the first name: the sum."""
    whole = {name: tensor for name, tensor in gradient.items() if name not in split}
    for name, first in split.items():
        part, before = gradient.get(name), whole.get(first)
        if part is not None:
            whole[first] = part if before is None else before + part
    return whole
