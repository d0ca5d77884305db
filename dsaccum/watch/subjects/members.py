"""Optimizers that step parameters of one module at the same boundary, read one by one and put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dsaccum.instruments.gradients import ObservedStep, Snapshot
from dsaccum.instruments.optimizer_saw import SeenGradient, optimizer_saw
from dsaccum.watch.subjects.end_clipping import EndClipping, Unclipped
from dsaccum.watch.subjects.plain import PlainAdapter


class Member:
    """One of them.

    Args:
        module: the user's own.
        optimizer: that steps some of its parameters.
        on_backward: told when a backward pass reaches the smallest of these.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, on_backward: Callable[[Member], None]
    ) -> None:
        self.optimizer = optimizer
        self.adapter = PlainAdapter(module, optimizer)
        self.observed: ObservedStep | None = None
        self.unclipped: Unclipped | None = None
        smallest = min((p for p in self.adapter.stepped.values() if p.requires_grad), key=lambda p: p.numel())
        self._sentinel = smallest.register_post_accumulate_grad_hook(lambda _: on_backward(self))

    def leave(self) -> None:
        """Nothing stays on the run; a second time does nothing."""
        self._sentinel.remove()

    @property
    def outside(self) -> int:
        """Elements that it steps and the module has not."""
        return sum(
            p.numel()
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and p.grad is not None and id(p) not in self.adapter.names
        )

    def before_step(self, clipping: EndClipping, micro_steps: int) -> None:
        """What it is about to get."""
        self.unclipped = clipping.unclipped(self.adapter.gradients(), micro_steps)
        snapshot = self.adapter.snapshot()
        self.observed = ObservedStep(self.unclipped.gradients, 1.0, snapshot, optimizer=self.optimizer)

    def after_step(self) -> None:
        """What it did."""
        if self.observed is not None:
            self.observed.after = self.adapter.snapshot()


def together(observed: list[ObservedStep]) -> ObservedStep:
    """As one step of one optimizer."""
    gradients: dict[str, Tensor | None] = {}
    for each in observed:
        gradients |= each.gradients
    before, after = _joined(each.before for each in observed), _joined(each.after for each in observed)
    return replace(observed[0], gradients=gradients, before=before, after=after)


def saw_together(observed: list[ObservedStep]) -> dict[str, SeenGradient] | None:
    """What reached them; None where one of them leaves no trace."""
    whole: dict[str, SeenGradient] = {}
    for each in observed:
        seen = optimizer_saw(each)
        if seen is None:
            return None
        whole |= seen
    return whole


def elements_of(optimizer: torch.optim.Optimizer) -> int:
    """That it trains."""
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad)


def updates_before(observed: ObservedStep, steps: int) -> int:
    """Updates before, as the optimizer itself counts; where it doesn't, those that were seen."""
    assert observed.before is not None
    counts = [int(state["step"]) for state in observed.before.states.values() if "step" in state]
    return max(counts, default=steps)


def _joined(snapshots: Iterable[Snapshot | None]) -> Snapshot:
    parts = [each for each in snapshots if each is not None]
    masters: dict[str, Tensor] = {}
    states: dict[str, dict[str, Tensor]] = {}
    options: dict[str, dict[str, Any]] = {}
    for part in parts:
        masters |= part.masters
        states |= part.states
        options |= part.options
    return Snapshot(parts[-1].parameters, masters, states, options)
