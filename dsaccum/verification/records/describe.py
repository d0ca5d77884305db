"""From evidence to the record's steps: figures only, no judgement."""

from __future__ import annotations

from dsaccum.reference_optimizers import global_norm
from dsaccum.verification.comparison.evidence import CaseEvidence, StepEvidence
from dsaccum.verification.comparison.gradient_check import GradientCheck
from dsaccum.verification.records.parts import (
    MOST_TENSORS,
    GradientRecord,
    LossRecord,
    Matrix,
    NormRecord,
    OptimizerSawRecord,
    StepRecord,
    TensorOff,
    UpdateRecord,
    WeightsRecord,
)
from dsaccum.verification.records.record import ResumedRecord, SplitRecord


def describe_step(step: StepEvidence) -> StepRecord:
    """One window's entry in the record."""
    return StepRecord(
        step=step.step,
        window=step.choice.index,
        data="probe" if step.choice.probe else "text",
        applied=step.applied,
        optimizer_steps=step.boundaries,
        learning_rate=max(step.rates, default=None),
        loss=LossRecord(deepspeed=step.loss, big_batch=step.truth.big_batch_loss, truth=step.truth.loss),
        micro_batch_weights=_weights(step),
        gradient=_gradient(step),
        optimizer_saw=_saw(step),
        update=_update(step),
        gradient_norm=_norm(step),
    )


def describe_resumption(evidence: CaseEvidence) -> ResumedRecord | None:
    """What the case went on from; None where it began."""
    point, restored = evidence.case.resumed, evidence.restored
    if point is None:
        return None
    manifest = point.checkpoint.manifest
    return ResumedRecord(
        directory=point.directory,
        checkpoint=point.checkpoint.path.name,
        step=manifest.counters.step,
        updates=point.updates,
        samples=manifest.counters.samples,
        split_before=SplitRecord(**manifest.split.model_dump()),
        versions_before=manifest.versions,
        compared=restored.parameters if restored is not None else None,
        states=list(restored.states) if restored is not None else [],
        differing={
            state: names[:MOST_TENSORS] for state, names in (restored.differing if restored is not None else {}).items()
        },
        stream_offset=evidence.stream_offset,
    )


def deciding(step: StepEvidence) -> GradientCheck | None:
    """The rank whose gradient decides: the first that is wrong, else rank 0."""
    return next((each for each in step.judged if not each.passed), next(iter(step.judged), None))


def _weights(step: StepEvidence) -> WeightsRecord:
    check = deciding(step)
    if check is None:
        return WeightsRecord(expected=_matrix(step.truth.due_in_order, step), reason="the optimizer did not step")
    by_rank = [_shown(each, step) if each is not None else None for each in step.gradients]
    return WeightsRecord(
        expected=_matrix(step.truth.due_in_order, step),
        recovered=_shown(check, step),
        by_rank=by_rank,
        max_error=check.max_error,
        tolerance=check.tolerance,
        condition=check.recovered.condition,
        reason=None if _shown(check, step) else _why_not_shown(check),
    )


def _shown(check: GradientCheck, step: StepEvidence) -> Matrix | None:
    """Weights are shown only where they account for the gradient, single tensors aside."""
    return _matrix(check.recovered.weights, step) if check.explained else None


def _why_not_shown(check: GradientCheck) -> str:
    if check.recovered.reason is not None:
        return check.recovered.reason
    left_over = check.recovered.residual or 0.0
    return f"no weights account for this gradient: {left_over:.2g} of it is left over, bound {check.residual_bound:.2g}"


def _matrix(flat: list[float | None] | list[float], step: StepEvidence) -> Matrix:
    ranks = len(step.truth.due[0])
    return [list(flat[start : start + ranks]) for start in range(0, len(flat), ranks)]


def _gradient(step: StepEvidence) -> GradientRecord:
    check = deciding(step)
    if check is None or check.worst is None:
        return GradientRecord()
    return GradientRecord(
        error=check.worst.error,
        bound=check.worst.bound,
        ratio=check.ratio,
        residual=check.recovered.residual,
        yardstick_error=check.yardstick_error,
        noise=check.noise,
        worst_parameter=check.worst.name,
        tensors_off=[
            TensorOff(name=tensor.name, ratio=tensor.ratio, error=tensor.error, bound=tensor.bound)
            for tensor in check.off
        ],
    )


def _saw(step: StepEvidence) -> OptimizerSawRecord:
    if step.saw is None:
        return OptimizerSawRecord()
    return OptimizerSawRecord(error=step.saw.error, bound=step.saw.bound, ratio=step.saw.ratio)


def _update(step: StepEvidence) -> UpdateRecord:
    if step.update is None or step.update.worst is None:
        return UpdateRecord()
    worst = step.update.worst
    return UpdateRecord(
        error=worst.error,
        bound=worst.bound,
        ratio=step.update.ratio,
        worst_parameter=worst.name,
        tensors_off=[
            TensorOff(name=tensor.name, ratio=tensor.ratio, error=tensor.error, bound=tensor.bound)
            for tensor in step.update.off
        ],
    )


def _norm(step: StepEvidence) -> NormRecord:
    check = deciding(step)
    captured = step.optimizer_step
    clipped = None
    if captured is not None and captured.saw:
        clipped = global_norm({name: seen.values for name, seen in captured.saw.items()})
    own = captured.norm if captured is not None else None
    return NormRecord(
        deepspeed=own if own is not None else (check.norm if check else None),
        big_batch=global_norm(step.truth.gradient) if step.truth.gradient else None,
        clipped=clipped,
    )
