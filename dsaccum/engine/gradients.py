"""The reduced gradient at ZeRO 0, which DeepSpeed leaves in ``param.grad``: its norm, and what if it isn't finite.

ZeRO 1 to 3 and bf16 keep their own norm and skip a step whose gradient is not finite; ZeRO 0 in fp32 does neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of all gradients together, a scalar on their device; copies nothing but one number per tensor."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients, foreach=True)


@contextmanager
def step_discarded(engine: Any) -> Iterator[None]:
    """Inside, ``engine.step()`` at the boundary takes DeepSpeed's own overflow path.

    The optimizer does nothing, gradients are cleared, ``skipped_steps`` counts up, the scheduler stays where it is and
    the window's counters advance: exactly what ZeRO 1 to 3 do with a gradient that is not finite.
    """
    optimizer = engine.optimizer
    step = optimizer.step
    optimizer.step, optimizer.overflow = (lambda *_, **__: None), True
    try:
        yield
    finally:
        optimizer.step = step
        del optimizer.overflow


class GradientWitness:
    """Remembers which parameters received a gradient, from the moment it is made until ``close``."""

    def __init__(self, module: nn.Module) -> None:
        self._trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._seen: set[str] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._seen.add(name))
            for name, parameter in self._trained.items()
        ]

    def close(self) -> list[str]:
        """Stop watching; returns the names of trained parameters that got no gradient at all."""
        for hook in self._hooks:
            hook.remove()
        return [name for name in self._trained if name not in self._seen]
