"""From judged windows to the record ``dsaccum.watch/1``: figures only."""

from __future__ import annotations

from collections.abc import Sequence

from dsaccum.reference_optimizers import global_norm
from dsaccum.verification.comparison.gradient_check import GradientCheck
from dsaccum.verification.records.parts import (
    GradientRecord,
    NormRecord,
    OptimizerSawRecord,
    StepRecord,
    TensorOff,
    UpdateRecord,
    WeightsRecord,
)
from dsaccum.verification.records.record import ModelRecord
from dsaccum.verification.records.watch import (
    DividedBy,
    EffectiveBatchAsRun,
    TokenWeightsRecord,
    WatchedRecord,
    WindowRecord,
)
from dsaccum.watch.claims import NO_WEIGHTS, rows_twice
from dsaccum.watch.communication import communication_notes, communication_record
from dsaccum.watch.diagnosis import Finding
from dsaccum.watch.judge import Judged
from dsaccum.watch.memory import memory_record
from dsaccum.watch.rows_fed import rows_notes
from dsaccum.watch.schedule import schedule_notes
from dsaccum.watch.window_truth import Matrix
from dsaccum.watch.z_loss import z_note


def describe_window(judged: Judged) -> WindowRecord:
    """One window's entry."""
    finding = Finding(judged)
    return WindowRecord(
        window=judged.facts.window,
        verdict=finding.claims.verdict,
        claims=finding.claims,
        reasons=finding.reasons,
        causes=finding.causes,
        effective_batch=_batch(judged),
        token_weights=_tokens(judged),
        divided_by=_divided(judged),
        arriving=[list(row) for row in judged.arriving],
        step=_step(judged),
        truth=judged.window.ranks[0].truth,
        communication=communication_record(judged.window),
        memory=memory_record(judged.window),
        notes=_notes(judged, finding),
    )


def _notes(judged: Judged, finding: Finding) -> list[str]:
    own = [note for rank in judged.window.ranks for note in rank.notes]
    of_tokens = z_note(judged.tokens.z) if judged.tokens is not None else []
    of_rows = [] if finding.claims.samples == "fail" else rows_notes(rows_twice(judged))
    seen = [*communication_notes(judged.window), *schedule_notes(judged.window)]
    return list(dict.fromkeys([*own, *of_tokens, *of_rows, *seen]))


def describe_subject(judged: Judged, windows: Sequence[WindowRecord]) -> WatchedRecord:
    """One engine's entry."""
    facts = judged.facts
    return WatchedRecord(
        number=facts.engine,
        kind=facts.kind,
        framework=facts.framework,
        model=ModelRecord(class_name=facts.model, parameters=facts.parameters),
        trained_parameters=facts.trained,
        precision=facts.precision,
        accumulation_dtype=facts.accumulation_dtype,
        zero_stage=facts.zero_stage,
        windows=list(windows),
    )


def _batch(judged: Judged) -> EffectiveBatchAsRun:
    rows = [each for rank in judged.window.ranks for each in rank.rows]
    return EffectiveBatchAsRun(
        world_size=len(judged.window.ranks),
        micro_batch=rows[0] if rows and len(set(rows)) == 1 else None,
        accumulation_steps=judged.window.micro_steps,
        total=sum(rows),
        targets=judged.tokens.due if judged.tokens is not None else None,
        configured_accumulation_steps=judged.facts.accumulation_steps,
        configured_micro_batch=judged.facts.micro_batch,
    )


def _tokens(judged: Judged) -> TokenWeightsRecord:
    tokens = judged.tokens
    if tokens is None:
        return TokenWeightsRecord(reason=judged.unreadable)
    if not judged.explained:
        return TokenWeightsRecord(reason=NO_WEIGHTS, targets=tokens.due, loss=tokens.kind)
    return TokenWeightsRecord(
        sum=tokens.total,
        minimum=tokens.smallest,
        maximum=tokens.largest,
        expected=tokens.expected,
        targets=tokens.due,
        on_padding=tokens.on_padding[0],
        uneven_micro_batches=len(tokens.uneven),
        remainder=tokens.remainder,
        tolerance=tokens.tolerance,
        loss=tokens.kind,
        histogram=tokens.histogram,
    )


def _divided(judged: Judged) -> DividedBy:
    arriving, engine = _flat(judged.arriving), _flat(judged.engine)
    passing = [v for row in judged.passing[0] for v in row if v is not None]
    told = judged.unreadable is None or all(seed is not None for rank in judged.window.ranks for seed in rank.seeds)
    return DividedBy(
        script=_mean([a / e for a, e in zip(arriving, engine, strict=True) if e]) if told else None,
        engine=_mean(engine),
        ranks=mean / (judged.factor or 1.0) if (mean := _mean(passing)) is not None else None,
        after_backward=judged.factor,
    )


def _step(judged: Judged) -> StepRecord:
    step = judged.window.ranks[0].step
    checks = judged.weighting if judged.weighting is not None else judged.way
    truth = judged.weighting_truth if judged.weighting_truth is not None else judged.way_truth
    rates = {float(options["lr"]) for options in step.before.options.values()} if step and step.before else set()
    saw, update = judged.saw, judged.update
    way = next((each for each in judged.way if not each.passed), judged.way[0])
    worst = update.worst if update else None
    return StepRecord(
        step=judged.facts.window,
        applied=step.applied if step else None,
        optimizer_steps=[judged.window.micro_steps],
        learning_rate=max(rates, default=None),
        micro_batch_weights=_weights(checks, truth.due),
        gradient=_gradient(way),
        optimizer_saw=OptimizerSawRecord(error=saw.error, bound=saw.bound, ratio=saw.ratio)
        if saw
        else OptimizerSawRecord(),
        update=UpdateRecord(
            error=worst.error,
            bound=worst.bound,
            ratio=update.ratio,
            worst_parameter=worst.name,
            tensors_off=[TensorOff(name=t.name, ratio=t.ratio, error=t.error, bound=t.bound) for t in update.off],
        )
        if update and worst
        else UpdateRecord(),
        gradient_norm=NormRecord(
            deepspeed=way.norm,
            clipped=global_norm({n: s.values for n, s in step.saw.items()}) if step and step.saw else None,
        ),
    )


def _weights(checks: list[GradientCheck], due: Matrix) -> WeightsRecord:
    check = next((each for each in checks if not each.weights_right), checks[0])
    by_rank = [_matrix(each.recovered.weights, len(due[0])) if each.explained else None for each in checks]
    shown = by_rank[checks.index(check)]
    reason = None
    if shown is None:
        left = check.recovered.residual or 0.0
        reason = check.recovered.reason or (
            f"no weights account for this gradient: {left:.2g} of it is left over, bound {check.residual_bound:.2g}"
        )
    return WeightsRecord(
        expected=[list(row) for row in due],
        recovered=shown,
        by_rank=by_rank,
        max_error=check.max_error,
        tolerance=check.tolerance,
        condition=check.recovered.condition,
        reason=reason,
    )


def _gradient(check: GradientCheck) -> GradientRecord:
    worst = check.worst
    return GradientRecord(
        error=worst.error if worst else None,
        bound=worst.bound if worst else None,
        ratio=check.ratio,
        residual=check.recovered.residual,
        yardstick_error=check.yardstick_error,
        worst_parameter=worst.name if worst else None,
        tensors_off=[TensorOff(name=t.name, ratio=t.ratio, error=t.error, bound=t.bound) for t in check.off],
    )


def _matrix(flat: list[float | None], ranks: int) -> list[list[float | None]]:
    return [list(flat[start : start + ranks]) for start in range(0, len(flat), ranks)]


def _flat(matrix: Matrix) -> list[float]:
    return [each for row in matrix for each in row]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
