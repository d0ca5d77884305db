"""A case's windows, one after another: the truth of each, and how far what the ranks did is from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor, nn

from dsaccum.reference import SummedLoss
from dsaccum.reference_optimizers import NotRebuilt, rebuild_optimizer
from dsaccum.reference_schedules import rebuild_schedule
from dsaccum.verification.cases.arguments import LOOPS
from dsaccum.verification.cases.case import Case, WindowChoice
from dsaccum.verification.cases.saved_state import SavedState
from dsaccum.verification.comparison.evidence import (
    CaseEvidence,
    Counts,
    Rules,
    StepEvidence,
    gather_step,
    start_differing,
)
from dsaccum.verification.comparison.restored_check import check_restored, from_saved
from dsaccum.verification.comparison.sample_check import check_samples
from dsaccum.verification.comparison.stream_check import stream_offset
from dsaccum.verification.comparison.ties import split_ties
from dsaccum.verification.comparison.trajectory import PERTURBED_RUNS, compare_trajectory
from dsaccum.verification.comparison.truth import ReferenceSide
from dsaccum.verification.comparison.update_check import changed_between, frozen_between
from dsaccum.verification.progress import Progress
from dsaccum.verification.records.parts import TrajectoryRecord
from dsaccum.verification.subject.capture import Start, WindowCapture
from dsaccum.verification.subject.tasks import Ran

TRAJECTORY_LIMIT = 2e10
"""Parameters times tokens of all its runs: about 2 s on two cores."""


def compare(
    case: Case,
    model: nn.Module,
    loss: SummedLoss | None,
    starts: list[Start],
    captures: list[list[WindowCapture]],
    runs: list[Ran],
    progress: Progress,
    *,
    with_trajectory: bool = True,
    saved: SavedState | None = None,
) -> CaseEvidence:
    """Judge every window against its truth.

    Args:
        case: what is verified.
        model: of the case, plain.
        loss: the user's own; None for next-token cross entropy.
        starts: by rank.
        captures: by window and rank.
        runs: what each rank said in the end.
        progress: told of each window.
        with_trajectory: whether the reference's own runs are made, on which no verdict rests.
        saved: what the reference goes on from, where the case does; it takes nothing of it from the run.
    """
    restored = None
    if saved is not None and captures and captures[0]:
        restored = check_restored(saved, captures[0][0])
        starts, captures = from_saved(saved, starts, captures)
    side = ReferenceSide(case, model, loss)
    rules = _rules(case)
    values: Mapping[str, Tensor] = {**model.state_dict(), **starts[0].buffers}
    values_before: list[Mapping[str, Tensor]] = []
    split = split_ties(model, starts[0].trained)
    before = [start.checksums for start in starts]
    updates = case.updates_before
    steps: list[StepEvidence] = []
    for index, window in enumerate(captures):
        progress.detail(f"window {index + 1} of {len(captures)}")
        values = _values_before(window[0], starts[0]) or values
        values_before.append(values)
        choice = case.windows[index]
        due = side.micro_batches(choice)
        still_tied = not (
            split and updates > case.updates_before
        )  # from then on the run has values that this model cannot have
        others = [other for other in _others(case, choice) if other.index != choice.index]
        steps.append(
            _without_legal_oddities(
                gather_step(
                    case,
                    rules,
                    side.window(choice, values),
                    side.sketch,
                    choice,
                    window,
                    split=split,
                    comparable=[each == before[0] and still_tied for each in before],
                    changed_before=_changed_before(captures, index),
                    frozen_before=_frozen_before(captures, index),
                    counts=_counts(due, side.targets),
                    updates_before=updates,
                    loss=runs[0].losses[index] if still_tied else None,
                    sample_faults=check_samples(
                        window, due, [side.micro_batches(other) for other in others], ours=case.loop in LOOPS
                    ),
                )
            )
        )
        updates += sum(step.applied for step in window[0].steps)
        before = [capture.checksums for capture in window]
    progress.detail("additivity and trajectory")
    errors = side.additivity(case.windows[0], values_before[0])
    firsts = [window[0] for window in captures]
    worst = max(errors, key=errors.__getitem__, default="")
    return CaseEvidence(
        case=case,
        steps=steps,
        start_differing=start_differing(starts),
        additivity=(errors.get(worst, 0.0), worst),
        optimizer=rules.optimizer,
        schedule=rules.schedule,
        mixed_truth=side.float32_inside(case.windows[0], values_before[0]),
        replicas_compared=len(starts[0].checksums),
        draws=runs[0].draws,
        drawing_alike=_drawing_alike(runs),
        split_ties=split,
        restored=restored,
        stream_offset=stream_offset(case, side, captures) if any(step.sample_faults for step in steps) else None,
        model_draws=side.draws(case.windows[0], values_before[0]),
        trajectory=_trajectory(case, side, rules, starts[0], firsts) if with_trajectory else TrajectoryRecord(),
    )


def _others(case: Case, choice: WindowChoice) -> list[WindowChoice]:
    """Windows from which stray rows may come, with the same kind of tokens."""
    nearby = [WindowChoice(index, choice.probe) for index in (case.resumed.nearby if case.resumed else ())]
    return [*(replace(other, probe=choice.probe) for other in case.windows), *nearby]


def _without_legal_oddities(step: StepEvidence) -> StepEvidence:
    """A loop may hand rows on as it likes while the gradient is right; other boundaries move the micro-steps."""
    if not step.gradient_right and step.stepped_once_at_the_end:
        return step
    return replace(step, sample_faults=[fault for fault in step.sample_faults if not fault.handed_on])


def _rules(case: Case) -> Rules:
    optimizer = rebuild_optimizer(case.config.get("optimizer"))
    if isinstance(optimizer, NotRebuilt):
        return Rules(optimizer, optimizer)
    return Rules(optimizer, rebuild_schedule(case.config.get("scheduler"), optimizer))


def _values_before(capture: WindowCapture, start: Start) -> Mapping[str, Tensor] | None:
    """Parameters and buffers as the window's first forward used them; None where no optimizer step shows them."""
    if not capture.steps or capture.steps[0].before is None:
        return None
    return {**start.buffers, **capture.steps[0].before.parameters}


def _changed_before(captures: list[list[WindowCapture]], index: int) -> list[str]:
    """What somebody changed between the window before and this one, on rank 0."""
    if index == 0 or not captures[index - 1][0].steps or not captures[index][0].steps:
        return []
    return changed_between(captures[index - 1][0].steps[-1], captures[index][0].steps[0])


def _frozen_before(captures: list[list[WindowCapture]], index: int) -> list[str]:
    """What is not trained, and somebody changed there."""
    if index == 0 or not captures[index - 1][0].steps or not captures[index][0].steps:
        return []
    return frozen_between(captures[index - 1][0].steps[-1], captures[index][0].steps[0])


def _drawing_alike(runs: list[Ran]) -> list[int]:
    """Ranks that would draw the same dropout masks as one before them, at the start or at the end."""
    return [
        rank
        for rank, run in enumerate(runs)
        if any(
            state == other
            for earlier in runs[:rank]
            for state, other in zip(run.random_states, earlier.random_states, strict=False)
        )
    ]


def _counts(due: list[list[dict[str, Tensor]]], targets: Callable[[dict[str, Tensor]], int]) -> Counts:
    """What people divide by."""

    def of(count: Callable[[dict[str, Tensor]], int | Tensor]) -> list[list[int]]:
        return [[int(count(batch)) for batch in step] for step in due]

    return Counts(
        targets=of(targets),
        labels=of(lambda batch: (batch["labels"] != -100).sum()),
        positions=of(lambda batch: batch["labels"].numel()),
        samples=of(lambda batch: (batch["labels"] != -100).any(dim=1).sum()),
        rows=of(lambda batch: len(batch["labels"])),
    )


def _trajectory(
    case: Case, side: ReferenceSide, rules: Rules, start: Start, captures: list[WindowCapture]
) -> TrajectoryRecord:
    """Left out where the reference's own runs would take long, or where a window was not one applied step."""
    steps = [step for capture in captures for step in capture.steps[:1]]
    whole = len(steps) == len(captures) and all(step.applied and step.before and step.after for step in steps)
    tokens = case.batch.total * case.experiment.data.sequence_length * len(case.windows)
    short = side.num_parameters * tokens * (PERTURBED_RUNS + 2) <= TRAJECTORY_LIMIT
    tied = {name for step in steps if step.before for name in step.before.masters} <= set(side.names)
    if (
        not (whole and short and tied)
        or isinstance(rules.optimizer, NotRebuilt)
        or isinstance(rules.schedule, NotRebuilt)
    ):
        return TrajectoryRecord()
    assert steps[0].before is not None
    return compare_trajectory(
        case,
        side,
        rules.optimizer,
        rules.schedule,
        start=steps[0].before.masters,
        states=steps[0].before.states if case.resumed is not None else {},
        frozen={**start.buffers, **steps[0].before.parameters},
        run=[step.after.masters for step in steps if step.after is not None],
    )
