"""From evidence to claims: what passes, what fails, and what could not be tested, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dsaccum.reference_optimizers import NotRebuilt, global_norm
from dsaccum.verification.comparison.evidence import CaseEvidence, StepEvidence
from dsaccum.verification.diagnosis.rates import rates_behind_updates
from dsaccum.verification.records.record import Claims, ClaimState

UPDATES_NEEDED = 2
"""Updates that changed something; with one, an error in states or count would not show."""


class Judged(NamedTuple):
    """One claim, and why it isn't simply right."""

    state: ClaimState
    reason: str = ""


def judge(evidence: CaseEvidence, measured: dict[str, Judged]) -> tuple[Claims, dict[str, str]]:
    """Claims and reasons.

    Args:
        evidence: of all steps.
        measured: the claims that have windows of their own: communication, memory.
    """
    judged = {name: look(evidence) for name, look in _JUDGES.items()} | measured
    claims = Claims(**{name: each.state for name, each in judged.items()})
    return claims, {name: each.reason for name, each in judged.items() if each.reason}


def _gradient(evidence: CaseEvidence) -> Judged:
    if not evidence.deterministic:
        return Judged("fail", f"one micro-batch's loss, computed twice, differs by {evidence.model_draws:.2g}")
    if not evidence.additive:
        error, name = evidence.additivity
        return Judged("fail", f"the big batch is not the sum of its micro-batches: {name} is off by {error:.2g}")
    for step in evidence.steps:
        if not step.stepped_once_at_the_end:
            after = ", ".join(map(str, step.boundaries)) or "none"
            return Judged("fail", f"step {step.step}: the optimizer stepped after micro-step {after}")
        if not step.gradient_right:
            return Judged("fail", f"step {step.step}: {_gradient_reason(step)}")
    if not evidence.steps:
        return Judged("untested", "loss scaling discarded every window")
    if not any(any(step.truth.sizes.values()) for step in evidence.steps):
        return Judged("untested", "the right gradient is zero in every window: nothing could be wrong")
    return Judged("pass")


def _gradient_reason(step: StepEvidence) -> str:
    for rank, check in enumerate(step.gradients):
        if check is None or check.passed:
            continue
        if check.max_error is None:
            return f"rank {rank}: {check.recovered.reason}"
        if not check.weights_right:
            return f"rank {rank}: a micro-batch's weight is off by {check.max_error:.2g} of what is due"
        worst = check.off[0]
        return f"rank {rank}: {worst.name} is off by {worst.error:.2g}, bound {worst.bound:.2g}"
    return "no gradient was seen"


def _clipping(evidence: CaseEvidence) -> Judged:
    seen = [step for step in evidence.steps if step.saw is not None]
    for step in seen:
        if step.saw is not None and not step.saw.passed:
            return Judged("fail", f"step {step.step}: off by {step.saw.error:.2g}, bound {step.saw.bound:.2g}")
    if not seen:
        return Judged("untested", "the optimizer leaves no trace of the gradient that it saw")
    limit = evidence.case.gradient_clipping
    if limit and not any(step.saw is not None and step.saw.clips for step in seen):
        norm = max(global_norm(step.truth.gradient) for step in seen)
        reached = f"no gradient reached the limit {limit:g} (largest norm {norm:.3g})"
        return Judged("untested", f"{reached}: verify a copy of the JSON with a smaller gradient_clipping, too")
    return Judged("pass")


def _update(evidence: CaseEvidence) -> Judged:
    for name, first in evidence.split_ties.items():
        return Judged("fail", f"{name} is trained apart from {first}, to which it is tied")
    for state, names in evidence.restored.differing.items() if evidence.restored is not None else ():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return Judged("fail", f"before step {_first(evidence)}: {state} of {names[0]}{more} not as in the checkpoint")
    for step in evidence.steps:
        if step.changed_before:
            name = step.changed_before[0]
            return Judged("fail", f"before step {step.step}: {name} or its optimizer state was changed between windows")
        if step.frozen_changed:
            return Judged("fail", f"by step {step.step}: {step.frozen_changed[0]} is not trained and changed")
        if step.state_lost:
            more = f" and {len(step.state_lost) - 1} more" if len(step.state_lost) > 1 else ""
            return Judged(
                "fail", f"step {step.step}: the optimizer's state of {step.state_lost[0]}{more} was lost in it"
            )
        if step.update is not None and not step.update.passed:
            worst = step.update.off[0]
            return Judged(
                "fail", f"step {step.step}: {worst.name} is off by {worst.error:.2g}, bound {worst.bound:.2g}"
            )
    for rule in (evidence.optimizer, evidence.schedule):
        if isinstance(rule, NotRebuilt):
            return Judged("untested", rule.reason)
    moved = sum(step.update is not None and step.update.moved for step in evidence.steps)
    if moved < UPDATES_NEEDED:
        return Judged(
            "untested", f"{moved} of {len(evidence.steps)} updates changed anything; {UPDATES_NEEDED} are needed"
        )
    return Judged("pass")


def _first(evidence: CaseEvidence) -> int:
    return evidence.case.counters.step + 1


def told_apart(step: StepEvidence) -> str:
    """The logged loss and the right one, with as many digits as it takes to differ."""
    logged, right = step.loss or 0.0, step.truth.loss
    digits = next((n for n in range(6, 17) if f"{logged:.{n}g}" != f"{right:.{n}g}"), 17)
    return f"{logged:.{digits}g} was logged, {right:.{digits}g} is right"


def _loss(evidence: CaseEvidence) -> Judged:
    known = [step for step in evidence.steps if step.loss is not None]
    for step in known:
        if not step.loss_right:
            return Judged("fail", f"step {step.step}: {told_apart(step)}")
    return Judged("pass") if known else Judged("untested", "the loop logged no finite loss")


def _schedule(evidence: CaseEvidence) -> Judged:
    known = [step for step in evidence.steps if step.settings is not None and step.rates]
    for step in known:
        if not step.schedule_right and step.settings is not None:
            used, due = max(step.rates), step.settings.learning_rate
            return Judged("fail", f"step {step.step}: learning rate {used:.4g}, due {due:.4g}")
    if used_otherwise := rates_behind_updates(evidence):
        first = used_otherwise[0]
        said = f"step {first.step}: the update was made with {first.used:.4g}, due {first.due:.4g}"
        return Judged("fail", f"{said}, and {first.due:.4g} is what the parameter group says")
    if not known:
        reasons = [rule.reason for rule in (evidence.schedule, evidence.optimizer) if isinstance(rule, NotRebuilt)]
        return Judged("untested", reasons[0] if reasons else "the optimizer never stepped")
    return Judged("pass")


_HANDED_ON = {
    "forward": "other tokens than are due",
    "cut": "rows that end before their last target",
    "missing": "not all rows that are due",
}


def _samples(evidence: CaseEvidence) -> Judged:
    for step in evidence.steps:
        for fault in step.sample_faults:
            rows = "the model was given other tokens" if fault.kind == "forward" else f"{fault.kind} rows"
            rows = f"the loop handed the model {fault.kind} rows" if fault.handed_on else rows
            if fault.handed_on and fault.kind in _HANDED_ON:
                rows = f"the loop handed the model {_HANDED_ON[fault.kind]}"
            return Judged(
                "fail", f"step {step.step}, rank {fault.rank}, micro-step {fault.micro_step}: {rows} ({fault.field})"
            )
    for rank in evidence.drawing_alike:
        return Judged("fail", f"rank {rank} would draw the same dropout masks as a rank before it")
    return Judged("pass")


def _replicas(evidence: CaseEvidence) -> Judged:
    if evidence.case.batch.world_size == 1:
        return Judged("not_applicable", "there is one rank")
    if evidence.start_differing:
        return Judged("fail", f"{evidence.start_differing[0]} differs between ranks before the first step")
    for step in evidence.steps:
        if step.replicas_differing:
            return Judged("fail", f"{step.replicas_differing[0]} differs between ranks after step {step.step}")
    if not evidence.replicas_compared:
        return Judged("not_applicable", "at ZeRO 3 no rank holds a whole parameter")
    return Judged("pass")


_JUDGES: dict[str, Callable[[CaseEvidence], Judged]] = {
    "gradient": _gradient,
    "clipping": _clipping,
    "update": _update,
    "loss": _loss,
    "schedule": _schedule,
    "samples": _samples,
    "replicas": _replicas,
}
