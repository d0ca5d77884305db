"""What a verification found, gathered for judgement: one object for each step, and one for the case."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dsaccum.reference_optimizers import NotRebuilt, Optimizer, StepSettings
from dsaccum.reference_schedules import Schedule
from dsaccum.verification.cases.case import Case, WindowChoice
from dsaccum.verification.comparison.gradient_check import FP32, GradientCheck, check_gradient, unit_roundoff
from dsaccum.verification.comparison.hypothesis import Hypothesis
from dsaccum.verification.comparison.restored_check import RestoredCheck
from dsaccum.verification.comparison.sample_check import SampleFault
from dsaccum.verification.comparison.sketch import GradientSketch
from dsaccum.verification.comparison.state_check import lost_states
from dsaccum.verification.comparison.ties import joined
from dsaccum.verification.comparison.truth import WindowTruth
from dsaccum.verification.comparison.update_check import (
    SawCheck,
    UpdateCheck,
    check_optimizer_saw,
    check_update,
    frozen_changes,
    hypothesis_of,
    rates_used,
)
from dsaccum.verification.records.parts import TrajectoryRecord
from dsaccum.verification.subject.capture import OptimizerStep, Start, WindowCapture

ADDITIVE = 1e-9
"""A sum over samples reaches about 1e-12 in float64; anything that couples samples is orders of magnitude above."""
SCHEDULE_TOLERANCE = 1e-9
"""Relative: both sides compute rates in float64 from the same numbers."""


@dataclass(frozen=True)
class Counts:
    """What people divide by, of each micro-batch [N][W].

    Attributes:
        targets: after the shift.
        labels: before it.
        positions: of the batch.
        samples: rows that hold one.
        rows: all of them; as ``samples`` in every window but a short one.
    """

    targets: list[list[int]]
    labels: list[list[int]]
    positions: list[list[int]]
    samples: list[list[int]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class StepEvidence:
    """One window.

    Attributes:
        step: from 1.
        choice: which window.
        truth: what it had to give.
        counts: of its micro-batches.
        boundaries: micro-steps after which the optimizer stepped, 0 before the first; [N] if all is well.
        applied: False where DeepSpeed discarded the window; None where the optimizer didn't step.
        gradients: of the window's last optimizer step, by rank; empty where it didn't step. None for a rank whose
            parameters were other than rank 0's before the window: this truth isn't its.
        vectors: the same gradients as sketches, by rank.
        saw: what reached the optimizer; None where it can't be told.
        update: the change of the parameters; None where the update rule isn't rebuilt or nothing stepped.
        update_number: which update of the run this was, from 1.
        settings: what the schedule is due to set; None where it isn't rebuilt.
        rates: learning rates that were used.
        optimizer_step: as captured on rank 0.
        loss: as the loop logged it.
        loss_bound: how far it may be from the truth.
        sample_faults: micro-batches that were not those that are due.
        not_finite: (rank, micro-step) whose gradient was not finite.
        replicas_differing: parameters whose copies differ between ranks after the window.
        frozen_changed: parameters that are not trained and changed, in this step or between the one before and it.
        changed_before: parameters that differ, or whose optimizer states do, from what the window before left.
        state_lost: parameters whose optimizer states became zeros inside the step, before or after their use.
    """

    step: int
    choice: WindowChoice
    truth: WindowTruth
    counts: Counts
    boundaries: list[int]
    applied: bool | None
    gradients: list[GradientCheck | None]
    vectors: list[dict[str, Tensor]]
    saw: SawCheck | None
    update: UpdateCheck | None
    update_number: int
    settings: StepSettings | None
    rates: set[float]
    optimizer_step: OptimizerStep | None
    loss: float | None
    loss_bound: float
    sample_faults: list[SampleFault]
    not_finite: list[tuple[int, int]]
    replicas_differing: list[str]
    frozen_changed: list[str]
    changed_before: list[str]
    state_lost: list[str] = field(default_factory=list)

    @property
    def stepped_once_at_the_end(self) -> bool:
        """The boundary is where it belongs."""
        return self.boundaries == [len(self.truth.due)]

    @property
    def gradient_right(self) -> bool:
        """On every rank."""
        return self.stepped_once_at_the_end and bool(self.gradients) and all(each.passed for each in self.judged)

    @property
    def ranks_disagree(self) -> bool:
        """Their reduced gradients are not the same to the bit: something was not reduced, or changed afterwards."""
        return any(
            not torch.equal(tensor, other.get(name, torch.empty(0)))
            for other in self.vectors[1:]
            for name, tensor in self.vectors[0].items()
        )

    @property
    def optimizer_broke(self) -> bool:
        """Parameters stopped being finite in this step, though every gradient was."""
        step = self.optimizer_step
        if step is None or step.before is None or step.after is None or self.not_finite:
            return False
        before, after = (
            all(bool(tensor.isfinite().all()) for tensor in snapshot.masters.values())
            for snapshot in (step.before, step.after)
        )
        return before and not after

    @property
    def judged(self) -> list[GradientCheck]:
        """The ranks whose gradients can be compared with this truth."""
        return [each for each in self.gradients if each is not None]

    @property
    def loss_right(self) -> bool:
        """The logged loss is the token mean of the window."""
        return self.loss is not None and abs(self.loss - self.truth.loss) <= self.loss_bound

    @property
    def schedule_right(self) -> bool:
        """Every group used the rate that is due."""
        assert self.settings is not None
        due = self.settings.learning_rate
        return all(math.isclose(rate, due, rel_tol=SCHEDULE_TOLERANCE, abs_tol=1e-30) for rate in self.rates)


@dataclass(frozen=True)
class CaseEvidence:
    """All steps and what was measured beside them.

    Attributes:
        case: what was asked for.
        steps: in order.
        start_differing: parameters whose copies differ between ranks before the first window.
        additivity: the largest float64 error of the big batch against its micro-batches, with its parameter.
        optimizer: rebuilt, or why not.
        schedule: likewise.
        mixed_truth: the float64 forward computed something in float32.
        draws: relative difference of the loss of one micro-batch computed twice: not 0 where something is drawn.
        model_draws: the same of the reference, which has nothing but the model and the loss.
        replicas_compared: parameters of which each rank has a copy; 0 at ZeRO 3 but for small ones.
        drawing_alike: ranks that would draw the same dropout masks as one before them.
        split_ties: parameters that are trained apart from the one that they are tied to, with its name.
        findings: of communication and memory, by fault identifier.
        trajectory: a further sight.
        restored: how the state that the run went on from differs from its checkpoint's; None where it began.
        stream_offset: by how many samples the stream was entered too late, where that explains all rows that were fed.
    """

    case: Case
    steps: list[StepEvidence]
    start_differing: list[str]
    additivity: tuple[float, str]
    optimizer: Optimizer | NotRebuilt
    schedule: Schedule | NotRebuilt
    mixed_truth: bool
    replicas_compared: int
    draws: float
    model_draws: float = 0.0
    drawing_alike: list[int] = field(default_factory=list)
    split_ties: dict[str, str] = field(default_factory=dict)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    trajectory: TrajectoryRecord = field(default_factory=TrajectoryRecord)
    restored: RestoredCheck | None = None
    stream_offset: int | None = None

    @property
    def additive(self) -> bool:
        """The loss is a sum over samples. Float32 inside the float64 forward costs additivity too: some roundings."""
        return self.additivity[0] <= ADDITIVE * (1e3 if self.mixed_truth else 1.0)

    @property
    def deterministic(self) -> bool:
        """Model and loss draw nothing. Where they do, the reference errs as the run does, and bounds mean nothing."""
        return self.model_draws <= ADDITIVE

    def without_overflows(self) -> CaseEvidence:
        """Without windows that fp16's loss scaling discarded, as it has to while it looks for its scale."""
        if self.case.precision not in ("fp16", "autocast fp16"):
            return self
        return replace(self, steps=[step for step in self.steps if step.applied is not False])


@dataclass(frozen=True)
class Rules:
    """The reference's optimizer and schedule."""

    optimizer: Optimizer | NotRebuilt
    schedule: Schedule | NotRebuilt

    def settings(self, update: int) -> StepSettings | None:
        """What update number ``update`` is due to use; None where it isn't known."""
        if isinstance(self.schedule, NotRebuilt) or isinstance(self.optimizer, NotRebuilt):
            return None
        return self.schedule(update)


def gather_step(
    case: Case,
    rules: Rules,
    truth: WindowTruth,
    sketch: GradientSketch,
    choice: WindowChoice,
    captures: list[WindowCapture],
    *,
    split: dict[str, str],
    comparable: list[bool],
    changed_before: list[str],
    frozen_before: list[str],
    counts: Counts,
    updates_before: int,
    loss: float | None,
    sample_faults: list[SampleFault],
) -> StepEvidence:
    """Judge one window's captures against its truth.

    Args:
        case: what is verified.
        rules: the reference's optimizer and schedule.
        truth: of the window.
        sketch: of its columns.
        choice: which window it is.
        captures: of this window, by rank.
        split: ties that are split, which are put together before gradients are compared.
        comparable: whether a rank had rank 0's parameters before the window, and those can be the reference's, too.
        changed_before: parameters that somebody changed since the window before.
        frozen_before: the same of those that are not trained.
        counts: of its micro-batches.
        updates_before: updates that were applied before this window.
        loss: as logged.
        sample_faults: found in what the ranks were fed.
    """
    first = captures[0]
    last = first.steps[-1] if first.steps else None
    gradients: list[GradientCheck | None] = []
    vectors = []
    for capture, same in zip(captures, comparable, strict=True):
        if capture.steps:
            step = capture.steps[-1]
            gradient = joined(step.gradients, split)
            vectors.append(sketch(gradient))
            check = check_gradient(case, truth, sketch, gradient, loss_scale=step.loss_scale) if same else None
            gradients.append(check)
    applied_inside = sum(step.applied for step in first.steps[:-1])
    number = updates_before + applied_inside + 1
    settings = rules.settings(number)
    moved = last is not None and last.applied
    lost = lost_states(last, case.gradient_clipping) if last is not None and moved else {}
    saw = check_optimizer_saw(last, case.gradient_clipping, lost) if last is not None and moved else None
    update = None
    if last is not None and moved and settings is not None and isinstance(rules.optimizer, Optimizer) and not split:
        update = check_update(last, rules.optimizer, due_hypothesis(saw, settings, number, last, truth, case))
    return StepEvidence(
        step=first.step,
        choice=choice,
        truth=truth,
        counts=counts,
        boundaries=sorted([*(step.micro_step for step in first.steps), *first.steps_past_engine]),
        applied=last.applied if last is not None else None,
        gradients=gradients,
        vectors=vectors,
        saw=saw,
        update=update,
        update_number=number,
        settings=settings,
        rates=rates_used(last) if last is not None else set(),
        optimizer_step=last,
        loss=loss,
        loss_bound=_loss_bound(case, truth),
        sample_faults=sample_faults,
        not_finite=[
            (rank, micro_step)
            for rank, capture in enumerate(captures)
            for micro_step, finite in enumerate(capture.finite, start=1)
            if not finite
        ],
        replicas_differing=differing([capture.checksums for capture in captures]),
        frozen_changed=list(dict.fromkeys([*frozen_before, *(frozen_changes(last) if last is not None else [])])),
        changed_before=changed_before,
        state_lost=list(lost),
    )


def due_hypothesis(
    saw: SawCheck | None, settings: StepSettings, number: int, step: OptimizerStep, truth: WindowTruth, case: Case
) -> Hypothesis:
    """The update as it is due, given the gradient that reached the optimizer."""
    absent = frozenset(step.gradients.keys() - truth.gradient.keys())
    return hypothesis_of(step, saw, case.gradient_clipping, settings, number - 1, absent)


def differing(checksums: list[dict[str, int]]) -> list[str]:
    """Parameters whose checksums are not the same on all ranks."""
    return [name for name in checksums[0] if len({each.get(name) for each in checksums}) > 1]


def start_differing(starts: list[Start]) -> list[str]:
    """The same before the first window."""
    return differing([start.checksums for start in starts])


def _loss_bound(case: Case, truth: WindowTruth) -> float:
    """4 times what the big batch in the config's precision is off by, and 4 u of the loss; 8 u of float32 for sums."""
    roundoff = max(unit_roundoff(case.precision), 2 * FP32)
    return 4 * abs(truth.big_batch_loss - truth.loss) + 4 * roundoff * abs(truth.loss)
