"""The loops that can be put under test: the product's own, and the ways in which people call DeepSpeed themselves.

Each takes windows from a stream, makes one optimizer step of each, and returns the loss of each as it would log it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dsaccum.config.errors import ConfigError
from dsaccum.config.factories import load_factory
from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import model_inputs, window_count
from dsaccum.training import loop as training
from dsaccum.training.checkpoints.manifest import Counters
from dsaccum.training.control import ControlExchange
from dsaccum.training.loop import Place, TrainingLoop
from dsaccum.training.metrics import StepMetrics
from dsaccum.training.stop_request import StopRequest

DSACCUM, HF_LABELS, OUTSIDE_LOSS = "dsaccum", "hf-labels", "outside-loss"


class Windows(training.Windows, Protocol):
    """The windows that a loop is to train on, in order."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Subject:
    """What is under test on one rank.

    Attributes:
        window_engine: DeepSpeed's engine, and what a run does with it.
        ranks: this rank's place.
        place: told how far the loop is.
        drops: whether its model had dropout, which was set to 0.
        products: how the user's settings round fp32 products, which are computed in full here.
        counters: where a run that goes on stands.
    """

    window_engine: WindowEngine
    ranks: Ranks
    place: Place
    drops: bool = False
    products: Mapping[str, Any] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine."""
        return self.window_engine.engine

    @property
    def accumulation_steps(self) -> int:
        """N."""
        return self.window_engine.batch.accumulation_steps


Loop = Callable[[Subject, Windows], list[float | None]]
MicroBatchLoss = Callable[..., Tensor]
"""function(engine, micro_batch): the loss that is handed to ``engine.backward``.

If it has a parameter ``window_targets``, it is given what the loss counts in the whole window on all ranks, too.
"""


def loop_of(name: str) -> Loop:
    """The loop of that name: one of ours, the user's ``FILE.py:function``, or a whole loop, ``package.module:loop``.

    Raises:
        ConfigError: ``FILE.py:function`` cannot be imported.
    """
    if _is_in_a_package(name):
        module, _, function = name.partition(":")
        whole: Loop = getattr(importlib.import_module(module), function)
        return whole
    if name == DSACCUM:
        return _dsaccum
    if name == HF_LABELS:
        return _plain_loop(_loss_of_the_model)
    if name == OUTSIDE_LOSS:
        return _plain_loop(_loss_outside)
    return _plain_loop(_checked(load_factory(name, key="--loop"), name))


def _dsaccum(subject: Subject, windows: Windows) -> list[float | None]:
    """The product's own training loop, as ``launch/train.py`` runs it."""
    metrics: list[StepMetrics] = []
    engine = subject.window_engine
    loop = TrainingLoop(
        engine=engine,
        stream=windows,
        exchange=ControlExchange(subject.ranks.rank, engine.device),
        watchdog=subject.place,
        stop=StopRequest(),
        record=metrics.append,
        note=lambda _: None,
    )
    start = subject.counters
    loop.run(start.step + len(windows), max_skipped=start.skipped_in_a_row + len(windows) + 1, start=start)
    return [step.loss for step in metrics]


def _plain_loop(loss_of: MicroBatchLoss) -> Loop:
    """``backward`` and ``step`` at every micro-step, the engine finds the boundary: DeepSpeed's documented way."""

    def run(subject: Subject, windows: Windows) -> list[float | None]:
        engine, wants_targets = subject.engine, _wants_targets(loss_of)
        logged: list[float | None] = []
        for index in range(len(windows)):
            subject.place.at(index + 1, 0, "data")
            losses, micro_batches = [], windows.window(index)
            more = {_TARGETS: _window_targets(subject, micro_batches)} if wants_targets else {}
            for micro_step, micro_batch in enumerate(micro_batches, start=1):
                on_device = {name: field.to(engine.device) for name, field in micro_batch.items()}
                subject.place.at(index + 1, micro_step, "forward")
                loss = loss_of(engine, on_device, **more)
                losses.append(loss.detach().double())
                subject.place.at(index + 1, micro_step, "backward")
                engine.backward(loss)
                subject.place.at(index + 1, micro_step, "step")
                engine.step()
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
            logged.append(float(mean) / subject.ranks.world_size)
        return logged

    return run


def _loss_of_the_model(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """The mean over the micro-batch's own target tokens, computed inside the model."""
    return engine(**micro_batch).loss


def _loss_outside(engine: Any, micro_batch: Mapping[str, Tensor]) -> Tensor:
    """The same mean, computed from the logits."""
    logits = engine(**model_inputs(micro_batch)).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), micro_batch["labels"][:, 1:].flatten())


def _checked(loss_of: MicroBatchLoss, name: str) -> MicroBatchLoss:
    """The user's function, held to what it is to return."""

    @wraps(loss_of)
    def checked(*arguments: Any, **keywords: Any) -> Tensor:
        loss = loss_of(*arguments, **keywords)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"it returned {found}", key="--loop", value=name, allowed="a scalar loss tensor")
        if not loss.requires_grad:
            problem = "it returned a loss without a graph, from which there is no backward"
            raise ConfigError(problem, key="--loop", value=name, fix="no detach(), item() or no_grad() on its way")
        return loss

    return checked


_TARGETS = "window_targets"


def _wants_targets(loss_of: MicroBatchLoss) -> bool:
    return _TARGETS in inspect.signature(loss_of).parameters


def _window_targets(subject: Subject, micro_batches: Iterable[Mapping[str, Tensor]]) -> int:
    """What the loss counts in this window, on all ranks."""
    counted = torch.tensor(window_count(subject.window_engine.loss, micro_batches), device=subject.engine.device)
    dist.all_reduce(counted)
    return int(counted)


def file_of(loop: str) -> Path | None:
    """The file of a loop that is the user's own."""
    ours = loop in (DSACCUM, HF_LABELS, OUTSIDE_LOSS) or _is_in_a_package(loop)
    return None if ours else Path(loop.rpartition(":")[0])


def _is_in_a_package(loop: str) -> bool:
    """``dsaccum.audit.ways:no_sync``, say; ``--loop`` lets no such name through."""
    module, colon, _ = loop.partition(":")
    return bool(colon) and not module.endswith(".py") and all(part.isidentifier() for part in module.split("."))
