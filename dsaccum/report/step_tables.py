"""A line for each step: what was trained, and each error beside its bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from dsaccum.report.figures import NOT_MEASURED, against, exceeds, numbered, plain, ratio, scientific
from dsaccum.report.layout import ASIDE, WRONG, columns, heading, labelled
from dsaccum.verification.records.record import GradientRecord, StepRecord, TrajectoryRecord, UpdateRecord, VerifyRecord

MOST_TENSORS = 5
_MARK = "!"


def step_lines(record: VerifyRecord, *, width: int) -> list[Text]:
    """Losses and rates, then errors; a mark where an error is outside its bound."""
    steps = record.steps
    if not steps:
        return []
    return [
        *heading("steps"),
        *columns([_TRAINED_HEAD, *map(_trained, steps)], left=frozenset({1})),
        *heading("error / bound", f"{_MARK} outside its bound" if _any_outside(steps) else ""),
        *columns([_ERROR_HEAD, *map(_errors, steps)]),
        *_drift(record.trajectory, width),
        *_remarks(steps, record.effective_batch.accumulation_steps, width),
    ]


_TRAINED_HEAD = ["step", "data", "loss: deepspeed", "truth", "rate", "norm", "clipped to"]
_ERROR_HEAD = ["step", "gradient ", "optimizer saw ", "ratio", "update ", "ratio"]


def _trained(step: StepRecord) -> list[Text | str]:
    norm = step.gradient_norm
    return [
        str(step.step),
        step.data or NOT_MEASURED,
        plain(step.loss.deepspeed, 6),
        plain(step.loss.truth, 6),
        scientific(step.learning_rate),
        plain(norm.deepspeed, 4),
        plain(norm.clipped, 4),
    ]


def _errors(step: StepRecord) -> list[Text | str]:
    saw, update = step.optimizer_saw, step.update
    return [
        str(step.step),
        _judged(step.gradient.error, step.gradient.bound),
        _judged(saw.error, saw.bound),
        ratio(saw.ratio),
        _judged(update.error, update.bound),
        ratio(update.ratio),
    ]


def _judged(error: float | None, bound: float | None) -> Text:
    outside = exceeds(error, bound)
    text = "not finite" if error is None and outside else against(error, bound)
    return Text(text + (_MARK if outside else " "), WRONG if outside else "")


def _any_outside(steps: Sequence[StepRecord]) -> bool:
    return any(
        exceeds(each.error, each.bound) for step in steps for each in (step.gradient, step.optimizer_saw, step.update)
    )


def _drift(trajectory: TrajectoryRecord, width: int) -> list[Text]:
    if trajectory.max is None:
        return []
    drift = against(trajectory.max, trajectory.bound).strip()
    mean = f", mean {scientific(trajectory.mean_drift)}" if trajectory.mean_drift is not None else ""
    return labelled("drift", f"{drift} at the most, over all steps{mean}", width=width)


def _remarks(steps: Sequence[StepRecord], accumulation_steps: int, width: int) -> Iterator[Text]:
    for step in steps:
        if step.applied is False:
            yield from labelled(
                f"step {step.step}", "DeepSpeed discarded this window: no update", width=width, style=WRONG
            )
        stepped = step.optimizer_steps
        if stepped is not None and stepped not in ([accumulation_steps], []):
            text = f"the optimizer stepped after {numbered('micro-step', stepped)}, due after {accumulation_steps}"
            yield from labelled(f"step {step.step}", text, width=width, style=WRONG)
    for noun in ("gradient", "update"):
        yield from _tensors_off(noun, steps, width)


def _tensors_off(noun: str, steps: Sequence[StepRecord], width: int) -> Iterator[Text]:
    """The tensors of the first step in which any is off, or at least the worst of them."""
    for step in steps:
        judged: GradientRecord | UpdateRecord = step.gradient if noun == "gradient" else step.update
        tensors = judged.tensors_off
        if exceeds(judged.error, judged.bound) and not tensors and judged.worst_parameter:
            yield from labelled(f"worst {noun}", f"{judged.worst_parameter}, step {step.step}", width=width)
            return
        weights = step.micro_batch_weights
        if not tensors or (noun == "gradient" and exceeds(weights.max_error, weights.tolerance)):
            continue  # where weights are wrong, all tensors are, and the matrix says why
        yield from heading(f"tensors with a wrong {noun}", f"step {step.step}")
        for tensor in tensors[:MOST_TENSORS]:
            off = against(tensor.error, tensor.bound).strip()
            yield Text(f"  {tensor.name}  ratio {ratio(tensor.ratio)}, error {off}")
        if len(tensors) > MOST_TENSORS:
            yield Text(f"  {len(tensors) - MOST_TENSORS} more in the record", ASIDE)
        return
