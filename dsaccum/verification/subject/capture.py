"""On each rank: run the loop under test and send what every window did. Nothing is judged here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dsaccum.instruments.gradients import ObservedStep, Snapshot, observe_steps
from dsaccum.instruments.optimizer_saw import SeenGradient, optimizer_saw
from dsaccum.instruments.replicas import checksum, parameter_checksums
from dsaccum.verification.subject.loops import Subject, Windows

MicroBatch = dict[str, Tensor]


@dataclass(frozen=True)
class OptimizerStep:
    """One step of the optimizer as one rank saw it.

    Attributes:
        micro_step: after which of the window it came, from 1.
        gradients: reduced, before clipping and unscaling, in the type that DeepSpeed accumulates in.
        loss_scale: what they are still multiplied with.
        applied: False where DeepSpeed discarded the window.
        norm: what DeepSpeed reports as the gradient's norm; None where it reports none.
        before: the optimizer's world before the step; rank 0 only, like all that follows.
        after: the same after the step and the schedule.
        saw: the gradient that reached the optimizer; None where it leaves no trace.
    """

    micro_step: int
    gradients: dict[str, Tensor | None]
    loss_scale: float
    applied: bool
    norm: float | None
    before: Snapshot | None = None
    after: Snapshot | None = None
    saw: dict[str, SeenGradient] | None = None


@dataclass
class WindowCapture:
    """What one window did on one rank.

    Attributes:
        step: from 1.
        micro_batches: as the loop was given them, [N].
        inputs: the token ids that reached each forward, in order; there may be more or fewer than N.
        inputs_at: the micro-step of each of them, from 1.
        steps: optimizer steps inside the window; one, at its end, if all is well.
        steps_past_engine: after which micro-steps the optimizer stepped without the engine; 0 is before the first.
        finite: whether each micro-step's own gradient was, seen at one parameter, which NaN and infinity all reach.
        checksums: of this rank's parameters after the window.
    """

    step: int
    micro_batches: list[MicroBatch] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    inputs_at: list[int] = field(default_factory=list)
    steps: list[OptimizerStep] = field(default_factory=list)
    steps_past_engine: list[int] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    checksums: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """One rank before its first window: buffers of the module, checksums of its parameters, what is trained."""

    buffers: dict[str, Tensor]
    checksums: dict[str, int]
    trained: list[str]


def describe_start(subject: Subject) -> Start:
    """Taken after the engine is built."""
    module = subject.engine.module
    buffers = {name: buffer.detach().cpu().clone() for name, buffer in module.named_buffers()}
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return Start(buffers, parameter_checksums(subject.engine), trained)


def random_state(device: Any) -> int:
    """A number from the states of the generators that dropout draws from; it takes nothing from them."""
    states = [torch.get_rng_state()]
    if torch.device(device).type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return checksum(torch.cat(states))


@contextmanager
def captured(subject: Subject, windows: Windows, send: Callable[[WindowCapture], None]) -> Iterator[Windows]:
    """Inside, each window that a loop takes from the stream yielded here is captured and sent when it is over.

    Args:
        subject: the engine under test; stays bit-identical.
        windows: what the loop would be given.
        send: gets each window as soon as its last ``engine.step()`` returned.
    """
    recorder = _Recorder(subject, windows, send)
    engine = subject.engine
    step = engine.step
    had_step = "step" in engine.__dict__
    with observe_steps(engine, past_engine=recorder.at_step_past_engine) as seen:
        recorder.seen = seen

        def counted(*arguments: Any, **keywords: Any) -> Any:
            result = step(*arguments, **keywords)
            recorder.after_micro_step()
            return result

        engine.step = counted
        hooks = [
            engine.module.register_forward_pre_hook(recorder.before_forward, with_kwargs=True),
            _sentinel(engine.module).register_hook(recorder.at_gradient),
        ]
        try:
            yield recorder
        finally:
            for hook in hooks:
                hook.remove()
            if had_step:
                engine.step = step
            else:
                del engine.step


class _Recorder:
    """A stream that remembers what it gave, and counts the micro-steps of the window that is under way."""

    def __init__(self, subject: Subject, windows: Windows, send: Callable[[WindowCapture], None]) -> None:
        self._subject, self._windows, self._send = subject, windows, send
        self._window = WindowCapture(0)
        self._micro_step = 0
        self.seen: list[ObservedStep] = []

    def __len__(self) -> int:
        return len(self._windows)

    def samples_in(self, index: int) -> int:
        return self._windows.samples_in(index)

    def window(self, index: int) -> list[MicroBatch]:
        self._window, self._micro_step = WindowCapture(index + 1), 0
        micro_batches = self._windows.window(index)
        # Copies: a loop may change its batch in place.
        self._window.micro_batches = [
            {name: field.clone() for name, field in micro_batch.items()} for micro_batch in micro_batches
        ]
        return micro_batches

    def before_forward(self, module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Remember the first tensor that is handed to the model; for language models the token ids."""
        given = keywords.get("input_ids", next((value for value in arguments if isinstance(value, Tensor)), None))
        if isinstance(given, Tensor):
            self._window.inputs.append(given.detach().cpu().clone())
            self._window.inputs_at.append(self._micro_step + 1)

    def at_gradient(self, gradient: Tensor) -> None:
        """Called with each micro-step's own gradient of the sentinel; None leaves it as it is."""
        self._window.finite.append(bool(gradient.isfinite().all()))

    def at_step_past_engine(self) -> None:
        self._window.steps_past_engine.append(self._micro_step)

    def after_micro_step(self) -> None:
        self._micro_step += 1
        for observed in self.seen:
            self._window.steps.append(self._portable(observed))
        self.seen.clear()
        if self._micro_step == self._subject.accumulation_steps:
            self._window.checksums = parameter_checksums(self._subject.engine)
            self._send(self._window)

    def _portable(self, observed: ObservedStep) -> OptimizerStep:
        first = self._subject.ranks.is_first
        norm = self._subject.engine.get_global_grad_norm()
        return OptimizerStep(
            micro_step=self._micro_step,
            gradients=observed.gradients,
            loss_scale=observed.loss_scale,
            applied=observed.applied,
            norm=None if norm is None else float(norm),
            before=observed.before if first else None,
            after=observed.after if first else None,
            saw=optimizer_saw(observed) if first else None,
        )


def _sentinel(module: nn.Module) -> nn.Parameter:
    """The smallest trained parameter."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return min(trained, key=lambda parameter: getattr(parameter, "ds_numel", parameter.numel()))
