"""The ways in which people call DeepSpeed: each a loop that DeepSpeed's documentation, or its code, says is right.

A way's loop is ``dsaccum.audit.ways:<function>`` to the ranks. It makes one optimizer step of each window, or so its
author believes, and returns the window's mean loss as its author would log it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from dsaccum.audit.models import frozen, reference_to, unused
from dsaccum.loss import window_count
from dsaccum.verification.subject.loops import HF_LABELS, OUTSIDE_LOSS, Subject, Windows

MicroBatch = dict[str, Tensor]
Json = dict[str, Any]


class NoSuchApi(Exception):
    """The installed DeepSpeed has no such thing."""

    def __init__(self, name: str) -> None:
        super().__init__(f"this DeepSpeed has no {name}")


@dataclass(frozen=True)
class Way:
    """One way of calling DeepSpeed.

    Attributes:
        id: for the record, and in the matrix.
        summary: what is done, in one line.
        loop: as ``Case.loop`` names it.
        rows: packed: equal numbers of targets; ragged: different ones; short: an epoch that ends after half a window.
        model: the ``model`` section of the experiment, where it is another.
        config: keys of the JSON beside those of the circumstances.
        least_steps: the smallest N with which this is another way than the plain one.
    """

    id: str
    summary: str
    loop: str
    rows: Literal["packed", "ragged", "short"] = "packed"
    model: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)
    least_steps: int = 1


class _Window:
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


def _way(run_window: Callable[[_Window], None]) -> Callable[[Subject, Windows], list[float | None]]:
    """The loop that does this with each window."""

    @wraps(run_window)
    def loop(subject: Subject, windows: Windows) -> list[float | None]:
        logged: list[float | None] = []
        for index in range(len(windows)):
            window = _Window(subject, windows, index)
            run_window(window)
            mean = torch.stack(window.losses).mean()
            dist.all_reduce(mean)
            logged.append(float(mean) / subject.ranks.world_size)
        return logged

    return loop


@_way
def scale_wrt_gas_false(window: _Window) -> None:
    """The user divides, and tells the engine not to.

    transformers' models divide their summed loss by ``num_items_in_batch``. With T targets in the window on W ranks it
    is given T / W, and what the engine returns is S W / T: the mean over W ranks of their sums is the window's mean.
    """
    for micro_batch in window.micro_batches:
        loss = window.forward(micro_batch, num_items_in_batch=window.targets_per_rank)
        window.losses[-1] *= window.steps
        window.engine.backward(loss, scale_wrt_gas=False)
        window.engine.step()


@_way
def loss_backward(window: _Window) -> None:
    """As in plain PyTorch: the loss divided by N, its own backward, and the engine's step."""
    for micro_batch in window.micro_batches:
        (window.forward(micro_batch) / window.steps).backward()
        window.engine.step()


@_way
def scaled_loss_backward(window: _Window) -> None:
    """As DeepSpeed documents it: ``engine.scale(loss).backward()`` in place of ``engine.backward(loss)``."""
    scale = window.api("scale")
    for micro_batch in window.micro_batches:
        scale(window.forward(micro_batch)).backward()
        window.engine.step()


@_way
def no_sync(window: _Window) -> None:
    """All micro-steps but the last inside ``engine.no_sync()``, where stepping is illegal; then one step."""
    *earlier, last = window.micro_batches
    with window.api("no_sync")():
        for micro_batch in earlier:
            window.engine.backward(window.forward(micro_batch))
            window.without_step()
    window.engine.backward(window.forward(last))
    window.engine.step()


@_way
def coalesced(window: _Window) -> None:
    """All micro-steps inside ``engine.coalesce_grad_reduction()``; then one step."""
    with window.api("coalesce_grad_reduction")():
        for position, micro_batch in enumerate(window.micro_batches, start=1):
            window.engine.backward(window.forward(micro_batch))
            if position < window.steps:
                window.without_step()
    window.engine.step()


@_way
def boundary_override(window: _Window) -> None:
    """The caller says where the boundary is, before each forward, and steps once."""
    set_boundary = window.api("set_gradient_accumulation_boundary")
    for position, micro_batch in enumerate(window.micro_batches, start=1):
        set_boundary(position == window.steps)
        window.engine.backward(window.forward(micro_batch))
        if position < window.steps:
            window.without_step()
    window.engine.step()


@_way
def unmanaged(window: _Window) -> None:
    """``"managed_gradient_accumulation": false``: backward for each micro-batch, one step for all."""
    for position, micro_batch in enumerate(window.micro_batches, start=1):
        window.engine.backward(window.forward(micro_batch))
        if position < window.steps:
            window.without_step()
    window.engine.step()


@_way
def two_backwards(window: _Window) -> None:
    """Two losses of one micro-batch, each with its own forward and backward; here both are half the loss."""
    for micro_batch in window.micro_batches:
        for _ in range(2):
            window.engine.backward(window.forward(micro_batch) / 2)
        window.engine.step()


@_way
def short_window(window: _Window) -> None:
    """The epoch ends when its samples do, however many micro-batches that were, and the next one begins."""
    for micro_batch in window.micro_batches:
        if int((micro_batch["labels"] != -100).sum()):
            window.engine.backward(window.forward(micro_batch))
            window.engine.step()
        else:
            window.without_step()


def _of_this_module(function: Callable[..., Any]) -> str:
    return f"{__name__}:{function.__name__}"


WAYS: Final[dict[str, Way]] = {
    way.id: way
    for way in (
        Way("own-loss", "engine.backward(engine(..., labels=...).loss), engine.step()", HF_LABELS),
        Way("outside-loss", "the same, with the loss computed outside from the logits", OUTSIDE_LOSS),
        Way(
            "scale-wrt-gas-false",
            "a loss that is divided already, engine.backward(loss, scale_wrt_gas=False)",
            _of_this_module(scale_wrt_gas_false),
        ),
        Way("loss-backward", "(loss / N).backward(), engine.step()", _of_this_module(loss_backward)),
        Way("scaled-backward", "engine.scale(loss).backward(), engine.step()", _of_this_module(scaled_loss_backward)),
        Way("no-sync", "N - 1 micro-steps inside engine.no_sync()", _of_this_module(no_sync), least_steps=2),
        Way("coalesced", "N micro-steps inside engine.coalesce_grad_reduction()", _of_this_module(coalesced)),
        Way(
            "boundary-override",
            "engine.set_gradient_accumulation_boundary(...) before each forward, one engine.step()",
            _of_this_module(boundary_override),
        ),
        Way(
            "unmanaged",
            '"managed_gradient_accumulation": false, one engine.step() for N backward calls',
            _of_this_module(unmanaged),
            config={"managed_gradient_accumulation": False},
        ),
        Way("two-backwards", "two engine.backward calls for one engine.step()", _of_this_module(two_backwards)),
        Way("checkpointing", "own-loss, activations recomputed", HF_LABELS, model={"activation_checkpointing": True}),
        Way("ragged", "own-loss, rows with different numbers of targets", HF_LABELS, rows="ragged"),
        Way(
            "short-window",
            "own-loss, an epoch that ends after half a window",
            _of_this_module(short_window),
            rows="short",
            least_steps=2,
        ),
        Way("frozen", "own-loss, half of the model frozen", HF_LABELS, model={"factory": reference_to(frozen)}),
        Way("unused", "own-loss, a parameter that no forward uses", HF_LABELS, model={"factory": reference_to(unused)}),
    )
}
"""By identifier."""
