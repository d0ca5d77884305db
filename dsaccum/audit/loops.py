"""What the ways of calling DeepSpeed do with a window. To the ranks each is ``dsaccum.audit.loops:<function>``.

A loop makes one optimizer step of each window, or so its author believes, and returns the window's mean loss as its
author would log it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsaccum.loss import window_count
from dsaccum.verification.subject.loops import Subject, Windows

MicroBatch = dict[str, Tensor]


class NoSuchApi(Exception):
    """The installed DeepSpeed has no such thing."""

    def __init__(self, name: str) -> None:
        super().__init__(f"this DeepSpeed has no {name}")


class Window:
    """One window on one rank: what a way's function needs of it."""

    def __init__(self, subject: Subject, windows: Windows, index: int) -> None:
        self.engine, self.steps = subject.engine, subject.accumulation_steps
        self._place, self._windows, self._index = subject.place, windows, index
        self._place.at(index + 1, 0, "data")
        self.micro_batches: Sequence[MicroBatch] = [
            {name: each.to(self.engine.device) for name, each in micro_batch.items()}
            for micro_batch in windows.window(index)
        ]
        targets = torch.tensor(window_count(subject.window_engine.loss, self.micro_batches), device=self.engine.device)
        dist.all_reduce(targets)
        self.targets_per_rank = targets / subject.ranks.world_size
        self.losses: list[Tensor] = []

    def forward(self, micro_batch: MicroBatch, **more: Any) -> Tensor:
        """The loss that the engine itself returns."""
        self._place.at(self._index + 1, len(self.losses) + 1, "forward")
        loss: Tensor = self.engine(**micro_batch, **more).loss
        self.losses.append(loss.detach().double())
        return loss

    def without_step(self) -> None:
        """A micro-step ends, and ``engine.step()`` is not called: who captures the window has to be told."""
        told = getattr(self._windows, "after_micro_step", None)
        if told is not None:
            told()

    def api(self, name: str) -> Any:
        """An attribute of the engine.

        Raises:
            NoSuchApi: it has none of that name.
        """
        if not hasattr(self.engine, name):
            raise NoSuchApi(f"engine.{name}")
        return getattr(self.engine, name)


def each_window(run_window: Callable[[Window], None]) -> Callable[[Subject, Windows], list[float | None]]:
    """The loop that does this with each window."""

    @wraps(run_window)
    def loop(subject: Subject, windows: Windows) -> list[float | None]:
        logged: list[float | None] = []
        for index in range(len(windows)):
            window = Window(subject, windows, index)
            run_window(window)
            mean = torch.stack(window.losses).mean()
            dist.all_reduce(mean)
            logged.append(float(mean) / subject.ranks.world_size)
        return logged

    return loop


@each_window
def scale_wrt_gas_false(window: Window) -> None:
    """The user divides, and tells the engine not to.

    transformers' models divide their summed loss by ``num_items_in_batch``. With T targets in the window on W ranks it
    is given T / W, and what the engine returns is S W / T: the mean over W ranks of their sums is the window's mean.
    """
    for micro_batch in window.micro_batches:
        loss = window.forward(micro_batch, num_items_in_batch=window.targets_per_rank)
        window.losses[-1] *= window.steps
        window.engine.backward(loss, scale_wrt_gas=False)
        window.engine.step()


@each_window
def loss_backward(window: Window) -> None:
    """As in plain PyTorch: the loss divided by N, its own backward, and the engine's step."""
    for micro_batch in window.micro_batches:
        (window.forward(micro_batch) / window.steps).backward()
        window.engine.step()


@each_window
def scaled_loss_backward(window: Window) -> None:
    """As DeepSpeed documents it: ``engine.scale(loss).backward()`` in place of ``engine.backward(loss)``."""
    scale = window.api("scale")
    for micro_batch in window.micro_batches:
        scale(window.forward(micro_batch)).backward()
        window.engine.step()


@each_window
def no_sync(window: Window) -> None:
    """All micro-steps but the last inside ``engine.no_sync()``, where stepping is illegal; then one step."""
    *earlier, last = window.micro_batches
    with window.api("no_sync")():
        for micro_batch in earlier:
            window.engine.backward(window.forward(micro_batch))
            window.without_step()
    window.engine.backward(window.forward(last))
    window.engine.step()


@each_window
def coalesced(window: Window) -> None:
    """All micro-steps inside ``engine.coalesce_grad_reduction()``; then one step."""
    with window.api("coalesce_grad_reduction")():
        for position, micro_batch in enumerate(window.micro_batches, start=1):
            window.engine.backward(window.forward(micro_batch))
            if position < window.steps:
                window.without_step()
    window.engine.step()


@each_window
def boundary_override(window: Window) -> None:
    """The caller says where the boundary is, before each forward, and steps once."""
    set_boundary = window.api("set_gradient_accumulation_boundary")
    for position, micro_batch in enumerate(window.micro_batches, start=1):
        set_boundary(position == window.steps)
        window.engine.backward(window.forward(micro_batch))
        if position < window.steps:
            window.without_step()
    window.engine.step()


@each_window
def unmanaged(window: Window) -> None:
    """``"managed_gradient_accumulation": false``: backward for each micro-batch, one step for all."""
    for position, micro_batch in enumerate(window.micro_batches, start=1):
        window.engine.backward(window.forward(micro_batch))
        if position < window.steps:
            window.without_step()
    window.engine.step()


@each_window
def two_backwards(window: Window) -> None:
    """Two losses of one micro-batch, each with its own forward and backward; here both are half the loss."""
    for micro_batch in window.micro_batches:
        for _ in range(2):
            window.engine.backward(window.forward(micro_batch) / 2)
        window.engine.step()


@each_window
def short_window(window: Window) -> None:
    """The epoch ends when its samples do, however many micro-batches that were, and the next one begins."""
    for micro_batch in window.micro_batches:
        if int((micro_batch["labels"] != -100).sum()):
            window.engine.backward(window.forward(micro_batch))
            window.engine.step()
        else:
            window.without_step()
