"""From one optimizer step to the next: recording, then computing again, then bringing ranks together.

A subject says when its windows begin and end and what its optimizer got; what is the same for all is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsaccum.instruments.gradients import ObservedStep
from dsaccum.instruments.optimizer_saw import SeenGradient, optimizer_saw
from dsaccum.instruments.replicas import checksum
from dsaccum.verification.comparison.sketch import GradientSketch
from dsaccum.verification.subject.capture import OptimizerStep
from dsaccum.watch.beside_tokens import statistics_in
from dsaccum.watch.clipping import ClipListener
from dsaccum.watch.desk import Desk
from dsaccum.watch.measuring import Measured, WindowMeasures
from dsaccum.watch.module_copy import Skeleton
from dsaccum.watch.not_judged import refuse_micro_steps, refuse_step, refuse_steps_aside
from dsaccum.watch.outputs import tensors_in
from dsaccum.watch.ranks import all_agree, decline, gathered, world_of
from dsaccum.watch.recompute import recompute
from dsaccum.watch.recording import Forward, Recorder
from dsaccum.watch.rows_fed import RowPrints, prints_of
from dsaccum.watch.schedule import RateLog
from dsaccum.watch.told import with_told_steps
from dsaccum.watch.window import Clip, RankWindow, RunFacts, WatchedWindow

WHOLE_BYTES = 1 << 30
"""Gradients of all micro-batches of all ranks are kept whole up to this size in all, above it as sketches."""
SKETCHED = "gradients were kept as sketches of 4,096 numbers for each tensor"
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp32"}


class Watching:
    """One subject: an engine, or an optimizer with its module.

    Args:
        desk: where findings go.
        module: the user's own, live.
        skeleton: of it, from before anything was hung on it.
        group: ranks that share a gradient; None for all.
    """

    def __init__(self, desk: Desk, module: nn.Module, skeleton: Skeleton, group: Any) -> None:
        self.desk, self.module, self.skeleton, self.group = desk, module, skeleton, group
        self.number = desk.number()
        self.steps = 0
        self.earlier: list[int] = []
        self.over = not desk.windows
        self.gone = False  # over, and nothing of it is left on the run
        self.recorder: Recorder | None = None
        self.measures: WindowMeasures | None = None
        self.clips: list[Clip] = []
        self.past_engine: list[int] = []
        self._clip_listener: ClipListener | None = None
        self._rates = RateLog()

    @property
    def recording(self) -> bool:
        """A window is under way."""
        return self.recorder is not None

    @property
    def micro_steps(self) -> int:
        """Of the window that is under way, so far."""
        return len(self.recorder.micro_steps) if self.recorder is not None else 0

    def begin_if_due(self) -> None:
        """Called when a window begins."""
        if not self.over and self.steps + 1 in self.desk.windows:
            self.skeleton = self.structure()
            self.measures = WindowMeasures(self.module.parameters)
            self.recorder = Recorder(self.module, self.fail, self.measures)
            rates = self._rates = RateLog()
            self.recorder.begins = lambda micro_step: rates.note(micro_step, self.parameter_groups())
            self.clips, self.past_engine = [], []
            self._clip_listener = ClipListener(self.before_clip, self.after_clip, self.fail)
            self.began()

    def structure(self) -> Skeleton:
        """Of the module, before anything of the watch's is hung on it."""
        return self.skeleton

    def began(self) -> None:
        """For subjects that look at more."""

    def before_clip(self, tensors: list[Tensor]) -> None:
        """Called before the script clips."""

    def after_clip(self, norm: Any, limit: float) -> None:
        """Called after it; the norm may still lie on several ranks."""
        self.clips.append(Clip(self.micro_steps, norm, limit))

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Of the optimizers, with their rates."""
        return []

    def expected_gradient_bytes(self, used: Sequence[Sequence[str]]) -> list[int] | None:
        """What each micro-step is due to reduce; None where there is no formula.

        Args:
            used: names of the parameters that got a gradient, by micro-step.
        """
        return None

    def stop_recording(self) -> Recorder | None:
        """Everything off the run."""
        recorder, self.recorder = self.recorder, None
        if self.measures is not None:
            self.measures.stop()
        if recorder is not None:
            recorder.stop()
        if self._clip_listener is not None:
            self._clip_listener.stop()
            self._clip_listener = None
        return recorder

    def all_record(self) -> bool:
        """Whether all ranks do: what follows is done together or not at all."""
        if not self.recording:
            return False
        try:
            together = all_agree(self._occasion, self.group)
        except Exception as error:
            self.fail(error)
            return False
        if not together:
            self.over = True
            self.stop_recording()
            self.desk.miss("another rank can't be watched; the script goes on unwatched")
        return together

    @property
    def _occasion(self) -> str:
        return f"{self.desk.session}/{self.number}/{self.steps + 1}"

    def fail(self, error: BaseException) -> None:
        """Give up on this subject."""
        self._drop()
        self.desk.give_up("this run can't be watched", error)

    def refuse(self, reason: str) -> None:
        """It turned out to be of a kind that is not watched."""
        if not self.over:
            self._drop()
            self.desk.refuse(reason)

    def _drop(self) -> None:
        decline(self._occasion, self.group)
        self.over = True
        self.stop_recording()

    def stepped(self) -> None:
        """Called after each optimizer step, watched or not."""
        self.steps += 1
        try:
            self._move_on()
        except Exception as error:
            self.fail(error)

    def _move_on(self) -> None:
        if self.measures is not None and not self.recording:
            self.measures.stop()  # where recording ended in a backward pass
        if self.steps >= max(self.desk.windows, default=0):
            self.over = True
        else:
            self.begin_if_due()
        if self.over and not self.recording:
            self.left()
            self.gone = True
            self.desk.seen(self.number)

    def left(self) -> None:
        """No window is to come: for subjects that hung something on the run."""

    def finish(
        self, observed: ObservedStep, facts: RunFacts, values: Mapping[str, Tensor], extra: Mapping[str, Any]
    ) -> None:
        """The window is over; called on all ranks.

        Args:
            observed: the optimizer's step, with snapshots.
            facts: of the run.
            values: parameters as the forward used them.
            extra: further fields of ``RankWindow``.
        """
        facts = with_told_steps(facts)
        recorder = self.stop_recording()
        assert recorder is not None
        rank, size = world_of(self.group)
        try:
            refuse_step(observed)
            own = self._rank_window(recorder, observed, values, rank, size, extra)
        except Exception as error:
            if self.desk.verbose:
                self.desk.give_up("the window could not be computed again", error)
            own = RankWindow(rank, failure=f"{type(error).__name__}: {' '.join(str(error).split())}")
        everyone = gathered(own, self._occasion, self.group)
        self.earlier.append(len(recorder.micro_steps))
        if rank == 0:
            self.desk.found(WatchedWindow(facts, everyone))

    def _measured(self, micro_steps: int) -> Measured:
        assert self.measures is not None
        measured = self.measures.result(micro_steps)
        if self.desk.subjects > 1:
            measured.others = True
            measured.memory_reason = "several models are trained in this process, and gradients of all are alive"
        return measured

    def _rank_window(
        self,
        recorder: Recorder,
        observed: ObservedStep,
        values: Mapping[str, Tensor],
        rank: int,
        size: int,
        extra: Mapping[str, Any],
    ) -> RankWindow:
        assert observed.before is not None
        micro_steps = recorder.micro_steps
        trained = list(observed.before.masters)
        shapes = {name: values[name].shape for name in trained}
        elements = sum(shape.numel() for shape in shapes.values())
        fits = (2 * len(micro_steps) + 2) * size * elements * 8 <= WHOLE_BYTES
        sketch = GradientSketch(shapes, whole_limit=elements if fits else 0)
        inputs = [_inputs(forwards) for forwards in micro_steps]
        refuse_steps_aside(recorder.changed, inputs)
        if recorder.changed is not None:  # it is this that is told, and not that outputs differ for it
            for forward in recorder.forwards:
                forward.norms = {}
        again = recompute(self.skeleton, self.module, values, trained, micro_steps, sketch)
        refuse_micro_steps(again.columns)
        gradient = {
            name: tensor.double() / observed.loss_scale
            for name, tensor in observed.gradients.items()
            if tensor is not None and name in shapes
        }
        return RankWindow(
            rank,
            columns=again.columns,
            truths=again.truths,
            truth=again.truth,
            tokens=again.tokens,
            beside=again.beside,
            own_statistics=statistics_in(self.module, micro_steps, size),
            seeds=[_seed(forwards) for forwards in micro_steps],
            gradient=sketch(gradient),
            inputs=inputs,
            row_prints=[_row_prints(forwards) for forwards in micro_steps],
            rows=[_rows(forwards) for forwards in micro_steps],
            shapes=[tuple(tuple(t.shape) for t in _given(forwards)) for forwards in micro_steps],
            input_bytes=[sum(t.numel() * t.element_size() for t in _given(forwards)) for forwards in micro_steps],
            measured=self._measured(len(micro_steps)),
            expected_gradient_bytes=self.expected_gradient_bytes([list(column) for column in again.columns]),
            calls=list(recorder.calls),
            clips=list(self.clips),
            past_engine=list(self.past_engine),
            changed=recorder.changed,
            rates=self._rates.of(len(micro_steps)),
            left_over=[name for name in recorder.left_over if name in shapes],
            step=self._portable(observed, len(micro_steps)) if rank == 0 else None,
            **{**extra, "notes": [*extra.get("notes", []), *([] if fits else [SKETCHED])]},
        )

    def saw(self, observed: ObservedStep) -> dict[str, SeenGradient] | None:
        """What reached the optimizer, as its states tell."""
        return optimizer_saw(observed)

    def _portable(self, observed: ObservedStep, micro_step: int) -> OptimizerStep:
        return OptimizerStep(
            micro_step=micro_step,
            gradients=observed.gradients,
            loss_scale=observed.loss_scale,
            applied=observed.applied,
            norm=None,
            before=observed.before,
            after=observed.after,
            saw=self.saw(observed),
        )


def _given(forwards: Sequence[Forward]) -> list[Tensor]:
    return [tensor for forward in forwards for _, tensor in tensors_in([forward.arguments, forward.keywords])]


def _seed(forwards: Sequence[Forward]) -> float | None:
    """What arrived at scalar outputs: the loss that the module returned."""
    scalars = [float(g) for forward in forwards for g in forward.gradients.values() if g.numel() == 1]
    return sum(scalars) / len(scalars) if scalars else None


def _inputs(forwards: Sequence[Forward]) -> tuple[int, ...]:
    return tuple(checksum(tensor) for tensor in _given(forwards) if tensor.dim() > 0 and tensor.numel() > 1)


def _row_prints(forwards: Sequence[Forward]) -> RowPrints:
    return tuple(each for forward in forwards for each in prints_of(forward.arguments, forward.keywords))


def _rows(forwards: Sequence[Forward]) -> int:
    """Of the first tensor that each forward was given."""
    return sum(
        next((int(t.shape[0]) for _, t in tensors_in([f.arguments, f.keywords]) if t.dim() > 0), 0) for f in forwards
    )
