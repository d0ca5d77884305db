"""Causes of a wrong step, the gradient being what it is: clipping, schedule, count, decay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dsaccum.reference_optimizers import Adam, NotRebuilt, Optimizer, StepSettings, global_norm
from dsaccum.verification.comparison.evidence import SCHEDULE_TOLERANCE, CaseEvidence, StepEvidence, due_hypothesis
from dsaccum.verification.comparison.hypothesis import Hypothesis
from dsaccum.verification.comparison.update_check import check_update, unscaled
from dsaccum.verification.diagnosis.named import Named
from dsaccum.verification.diagnosis.rates import offset_behind_updates, rates_behind_updates

FURTHEST = 64
"""Schedules are searched so many updates ahead."""
_EARLY = (
    "call lr_scheduler.step() after optimizer.step(), not before it, and once: engine.step() does both in that order. "
    "After the step the parameter group shows the right rate again"
)
_LATE = (
    "look for a rate that reaches the optimizer late: lr_scheduler.step() belongs right after optimizer.step(), once, "
    "and engine.step() does both"
)


def clipping_causes(evidence: CaseEvidence) -> list[Named]:
    """The gradient that reached the optimizer is another multiple of the reduced one than the limit asks for.

    Where the ranks' gradients differ, so does the norm of which each is clipped: it is no mistake of clipping.
    """
    for step in evidence.steps:
        saw, scale = step.saw, step.optimizer_step.loss_scale if step.optimizer_step else 1.0
        if saw is not None and not saw.passed and scale > 1 and _near(saw.ratio, scale):
            shown = {"step": step.step, "loss_scale": scale, "ratio": saw.ratio}
            return [Named(("loss-scale-not-removed",), shown, f"step {step.step}: {scale:g} times what is due")]
        if saw is not None and not saw.passed and saw.is_a_multiple and not step.ranks_disagree:
            norm = _norm(step)
            limit = norm * saw.coefficient * (saw.ratio or 0.0)
            shown = {
                "step": step.step,
                "norm": norm,
                "asked_limit": evidence.case.gradient_clipping,
                "ratio": saw.ratio,
            }
            clipped = limit < norm * (1 - 1e-4)
            detail = f"clipped to {limit:.4g}" if clipped else "not clipped"
            return [Named(("clipping-mismatch",), shown, f"step {step.step}: norm {norm:.4g}, {detail}")]
    return []


def schedule_causes(evidence: CaseEvidence) -> list[Named]:
    """The rates used, against the schedule read at other places."""
    known = [step for step in evidence.steps if step.settings is not None and len(step.rates) == 1]
    if isinstance(evidence.schedule, NotRebuilt) or all(step.schedule_right for step in known):
        return []
    rates = [next(iter(step.rates)) for step in known]
    due = [step.settings.learning_rate for step in known if step.settings is not None]
    steps = evidence.case.batch.accumulation_steps
    shown = {"rates": rates, "due": due}
    schedule = evidence.schedule

    def as_at(update: int) -> float:
        return schedule(max(update, 1)).learning_rate

    fitting = []
    # Advanced N times in each window, or N + 1 times with the engine's own: update n uses what is due about n N.
    paces = [(pace, first) for pace in (steps, steps + 1) if pace > 1 for first in range(1, pace + 1)]
    if any(_same(rates, [as_at((s.update_number - 1) * pace + first) for s in known]) for pace, first in paces):
        fitting.append("schedule-per-micro-step")
    offsets = [k for k in (*range(1, FURTHEST), -1, -2) if _same(rates, [as_at(s.update_number + k) for s in known])]
    if offsets:
        shown["offset"] = offsets[0]
        fitting.append("schedule-offset")
    wrong = next(index for index, step in enumerate(known) if not step.schedule_right)
    detail = f"step {known[wrong].step}: used {rates[wrong]:.4g}, due {due[wrong]:.4g}"
    return [Named(tuple(fitting) or ("rate-mismatch",), shown, detail)]


def update_causes(evidence: CaseEvidence) -> list[Named]:
    """Changes of parameters that are not what the gradient and the rate ask for."""
    named = []
    if evidence.split_ties:
        apart = "; ".join(f"{name} and {first}" for name, first in evidence.split_ties.items())
        named.append(Named(("tied-weights-split",), {"parameters": evidence.split_ties}, apart))
    for step in evidence.steps:
        if step.frozen_changed:
            shown = {"step": step.step, "parameters": step.frozen_changed[:20]}
            named.append(Named(("frozen-parameter-changed",), shown, f"by step {step.step}: {step.frozen_changed[0]}"))
            break
    wrong = [step for step in evidence.steps if step.update is not None and not step.update.passed]
    if wrong and not isinstance(evidence.optimizer, NotRebuilt):
        named += _absent_gradient(evidence, evidence.optimizer, wrong)
        named = named or _another_rate(evidence)
        named = named or _count_offset(evidence, evidence.optimizer, wrong[0])
    return named


def follows_from_norms(evidence: CaseEvidence) -> bool:
    """Every wrong update is right with the multiple of its gradient that was seen, of ranks whose norms differ."""
    for step in evidence.steps:
        if step.update is None or step.update.passed:
            continue
        saw, captured, settings = step.saw, step.optimizer_step, step.settings
        if saw is None or saw.ratio is None or captured is None or settings is None or not step.ranks_disagree:
            return False
        if isinstance(evidence.optimizer, NotRebuilt):
            return False
        due = due_hypothesis(saw, settings, step.update_number, captured, step.truth, evidence.case)
        seen = replace(due, coefficient=saw.coefficient * saw.ratio)
        if not check_update(captured, evidence.optimizer, seen).passed:
            return False
    return True


def _another_rate(evidence: CaseEvidence) -> list[Named]:
    """One factor on the rate explains every wrong step, though the rate that was set is right: changed on its way."""
    used = rates_behind_updates(evidence)
    if not used:
        return []
    shown: dict[str, Any] = {"steps": [each.step for each in used], "rates": [each.used for each in used]}
    detail = f"step {used[0].step}: used {used[0].used:.4g}, due {used[0].due:.4g}"
    offset = offset_behind_updates(evidence)
    if offset is None:
        return [Named(("rate-mismatch",), shown, detail)]
    whose = f"what is due {abs(offset)} update{'s' if abs(offset) > 1 else ''} {'later' if offset > 0 else 'earlier'}"
    shown |= {"due": [each.due for each in used], "offset": offset}
    return [Named(("schedule-offset",), shown, f"{detail}: {whose}", fix=_EARLY if offset > 0 else _LATE)]


def _count_offset(evidence: CaseEvidence, optimizer: Optimizer, step: StepEvidence) -> list[Named]:
    """Adam's update with another count fits."""
    if not isinstance(optimizer, Adam) or step.optimizer_step is None or step.settings is None:
        return []
    captured = step.optimizer_step
    due = due_hypothesis(step.saw, step.settings, step.update_number, captured, step.truth, evidence.case)
    # The betas and the rate as used: a wrong schedule has a cause of its own.
    used = StepSettings(next(iter(step.rates), step.settings.learning_rate), step.settings.betas)
    for offset in (1, 2, -1, *range(3, 2 * evidence.case.batch.accumulation_steps + 1)):
        count = due.updates_before + offset
        if count < 0:
            continue
        hypothesis: Hypothesis = replace(due, settings=used, updates_before=count)
        if check_update(captured, optimizer, hypothesis).passed:
            ratio = step.update.ratio if step.update else None
            shown = {"step": step.step, "count_before_the_step": count, "due": due.updates_before, "ratio": ratio}
            detail = f"{count + 1} where {due.updates_before + 1} is due"
            return [Named(("optimizer-count-offset",), shown, f"step {step.step}: count {detail}")]
    return []


def _absent_gradient(evidence: CaseEvidence, optimizer: Optimizer, steps: list[StepEvidence]) -> list[Named]:
    """Every tensor that is off is one without gradient in truth, and zeros in its place explain the update."""
    off = {tensor.name for step in steps if step.update is not None for tensor in step.update.off}
    if not off or any(name in step.truth.gradient for step in steps for name in off):
        return []
    for step in steps:
        if step.optimizer_step is None or step.settings is None:
            return []
        due = due_hypothesis(
            step.saw, step.settings, step.update_number, step.optimizer_step, step.truth, evidence.case
        )
        if not check_update(step.optimizer_step, optimizer, replace(due, absent=frozenset())).passed:
            return []
    return [Named(("absent-gradient-decayed",), {"parameters": sorted(off)[:20]}, sorted(off)[0])]


def _norm(step: StepEvidence) -> float:
    assert step.optimizer_step is not None
    return global_norm(unscaled(step.optimizer_step))


def _near(ratio: float | None, scale: float) -> bool:
    """Scales are powers of two; what low precision adds is far less than a tenth."""
    return ratio is not None and abs(ratio / scale - 1) < 0.1


def _same(rates: list[float], others: list[float]) -> bool:
    return all(
        abs(rate - other) <= SCHEDULE_TOLERANCE * max(abs(rate), abs(other))
        for rate, other in zip(rates, others, strict=True)
    )
