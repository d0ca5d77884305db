"""From evidence to named causes. Nothing here knows what was injected.

A cause that explains others stands alone: where the optimizer stepped at the wrong micro-step, the window's weights and
updates are wrong for that reason, and are not explained a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dsaccum.verification.comparison.evidence import CaseEvidence
from dsaccum.verification.diagnosis.causes import ADVICE, UNKNOWN
from dsaccum.verification.diagnosis.gradient import gradient_causes
from dsaccum.verification.diagnosis.hints import where_to_look
from dsaccum.verification.diagnosis.named import Named
from dsaccum.verification.diagnosis.resumption import (
    optimizer_state_not_restored,
    schedule_not_restored,
    stream_position_not_restored,
    weights_not_restored,
)
from dsaccum.verification.diagnosis.update import clipping_causes, follows_from_norms, schedule_causes, update_causes
from dsaccum.verification.records.record import Cause


def diagnose(evidence: CaseEvidence, failed: Mapping[str, str]) -> list[Cause]:
    """Causes of what failed; ``unknown-difference`` where something failed that none explains.

    Args:
        evidence: of all steps.
        failed: claims that failed, and why.
    """
    open_claims = set(failed)
    if not open_claims:
        return []
    if not evidence.deterministic:
        return [_cause(Named(("randomness-active",), {"reference_twice_differs_by": evidence.model_draws}))]
    if not evidence.additive:
        shown = {"float64_error": evidence.additivity[0], "worst_parameter": evidence.additivity[1]}
        return [_cause(Named(("loss-not-additive",), shown))]
    found: list[Named] = []
    for claims, look in _LOOKS:
        if open_claims & claims:
            named = look(evidence)
            found += named
            if named:
                open_claims -= claims
            for each in named:
                open_claims -= _ALSO_EXPLAINS.get(each.candidates[0], frozenset())
                unequal = each.candidates[0] == "ranks-not-reduced" and "update" in open_claims
                if unequal and follows_from_norms(evidence):
                    open_claims -= {"update"}
    if open_claims:
        shown = {"failed": {claim: failed[claim] for claim in sorted(open_claims)}}
        found.append(Named((UNKNOWN,), shown, fix=where_to_look(evidence, open_claims)))
    return [_cause(each, identifier) for each in found for identifier in each.candidates]


def _cause(named: Named, identifier: str | None = None) -> Cause:
    identifier = identifier or named.candidates[0]
    advice = ADVICE[identifier]
    return Cause(
        id=identifier,
        confidence="certain" if len(named.candidates) == 1 and identifier != UNKNOWN else "ambiguous",
        summary=advice.summary + (f" ({named.detail})" if named.detail else ""),
        evidence=named.evidence,
        fix=named.fix or advice.fix,
    )


def _not_finite(evidence: CaseEvidence) -> list[Named]:
    for step in evidence.steps:
        if step.optimizer_broke:
            return []  # what comes after is its consequence
        if step.not_finite:
            rank, micro_step = step.not_finite[0]
            where = {"step": step.step, "rank": rank, "micro_step": micro_step, "applied": step.applied}
            return [Named(("non-finite-gradient",), where, f"rank {rank}, step {step.step}, micro-step {micro_step}")]
    return []


_SAMPLE_FAULTS = {
    "another rank's": "ranks-share-data",
    "another window's": "samples-misplaced",
    "another place's": "samples-misplaced",
    "unknown": "samples-misplaced",
    "misaligned": "fields-misaligned",
    "forward": "samples-misplaced",
    "missing": "samples-misplaced",
}
_HANDED_ON = (
    "the loop was given the right micro-batch and handed the model another: look for a buffer, a prefetcher or an "
    "iterator of its own between the two"
)


def _samples(evidence: CaseEvidence) -> list[Named]:
    if moved := stream_position_not_restored(evidence):
        return moved
    named: dict[str, Named] = {}
    for step in evidence.steps:
        for fault in step.sample_faults:
            if fault.handed_on and fault.kind in ("forward", "cut"):
                continue  # of no other place: something was done to the rows themselves
            identifier = _SAMPLE_FAULTS[fault.kind]
            where = {
                "step": step.step,
                "rank": fault.rank,
                "micro_step": fault.micro_step,
                "field": fault.field,
                "rows": fault.kind,
            }
            place = f"first at step {step.step}, rank {fault.rank}, micro-step {fault.micro_step}: {fault.field}"
            fix = _HANDED_ON if fault.handed_on else None
            named.setdefault(identifier, Named((identifier,), where, place, fix))
    return list(named.values())


def _same_draws(evidence: CaseEvidence) -> list[Named]:
    alike = evidence.drawing_alike
    return [Named(("same-seed-on-every-rank",), {"ranks": alike}, f"rank {alike[0]}")] if alike else []


def _boundaries(evidence: CaseEvidence) -> list[Named]:
    for step in evidence.steps:
        if not step.stepped_once_at_the_end:
            inside = len(step.boundaries) > 1
            identifier = "step-inside-window" if inside else "boundary-shifted"
            shown = {"step": step.step, "optimizer_stepped_after_micro_steps": step.boundaries}
            after = ", ".join(map(str, step.boundaries)) or "none"
            return [Named((identifier,), shown, f"step {step.step}: after micro-step {after} of {len(step.truth.due)}")]
    return []


def _replicas(evidence: CaseEvidence) -> list[Named]:
    if evidence.start_differing:
        return [Named(("ranks-start-apart",), {"parameters": evidence.start_differing[:20]})]
    for step in evidence.steps:
        if step.replicas_differing:
            if step.ranks_disagree:
                return []  # the parameters differ since the gradients do
            shown = {"step": step.step, "parameters": step.replicas_differing[:20]}
            return [Named(("ranks-drift-apart",), shown, f"after step {step.step}: {step.replicas_differing[0]}")]
    return []


def _apart_before(evidence: CaseEvidence) -> list[Named]:
    """Ranks that were apart before the first wrong gradient: their gradients belong to other parameters."""
    wrong = next((step.step for step in evidence.steps if not step.gradient_right), None)
    apart = 0 if evidence.start_differing else next((s.step for s in evidence.steps if s.replicas_differing), None)
    return _replicas(evidence) if wrong is not None and apart is not None and apart < wrong else []


def _measured(*identifiers: str) -> Callable[[CaseEvidence], list[Named]]:
    def look(evidence: CaseEvidence) -> list[Named]:
        return [Named((each,), dict(evidence.findings[each])) for each in identifiers if each in evidence.findings]

    return look


_ALSO_EXPLAINS = {
    # Norms are taken over all ranks, and what is not reduced is not communicated.
    "ranks-not-reduced": frozenset({"replicas", "clipping", "communication"}),
    # No gradient buffer stands while the next micro-batch runs.
    "only-last-micro-batch": frozenset({"memory"}),
    # It shows in the updates, while the parameter group says what is due.
    "rate-mismatch": frozenset({"schedule"}),
    "schedule-offset": frozenset({"schedule"}),
}
# What explains which failed claims, in this order: a cause found closes the claims that follow from it.
_EVERYTHING = frozenset({"gradient", "clipping", "update", "loss", "schedule", "samples", "replicas", "communication"})
_LOOKS: list[tuple[frozenset[str], Callable[[CaseEvidence], list[Named]]]] = [
    (_EVERYTHING, _not_finite),
    (frozenset({"gradient", "loss", "clipping", "update", "replicas"}), weights_not_restored),
    (frozenset({"update"}), optimizer_state_not_restored),
    (frozenset({"schedule", "update"}), schedule_not_restored),
    (_EVERYTHING - {"communication"}, _samples),
    (frozenset({"samples"}), _same_draws),
    (_EVERYTHING | {"memory"}, _boundaries),
    (frozenset({"replicas", "gradient", "loss", "clipping"}), _apart_before),
    (frozenset({"gradient", "loss"}), gradient_causes),
    (frozenset({"clipping"}), clipping_causes),
    (frozenset({"schedule", "update"}), schedule_causes),
    (frozenset({"update"}), update_causes),
    (frozenset({"replicas"}), _replicas),
    (frozenset({"communication"}), _measured("reduced-every-micro-step")),
    (frozenset({"memory"}), _measured("activations-kept")),
]
