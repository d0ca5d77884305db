"""The causes of a watched window's claims that fail.

What was seen happening (where the optimizer stepped, what was clipped when, what ranks were fed, where tokens stand)
names a cause before patterns of weights do; those are read as ``verify`` reads them.
"""

from __future__ import annotations

from typing import Any, cast

from dsaccum.verification.comparison.evidence import CaseEvidence, StepEvidence
from dsaccum.verification.comparison.gradient_check import GradientCheck
from dsaccum.verification.comparison.truth import WindowTruth
from dsaccum.verification.diagnosis.causes import ADVICE, UNKNOWN
from dsaccum.verification.diagnosis.gradient import gradient_causes
from dsaccum.verification.diagnosis.named import Named
from dsaccum.verification.measures.communication import REDUCED_EVERY_MICRO_STEP
from dsaccum.verification.measures.memory import ACTIVATIONS_KEPT
from dsaccum.verification.records.record import Cause
from dsaccum.verification.records.watch import WatchClaims
from dsaccum.watch.claims import claims_of, clips_inside, repeated, rows_twice, sharing
from dsaccum.watch.clipping_advice import SUMMARY as CLIPPED_BY_SCRIPT
from dsaccum.watch.clipping_advice import clipping_mismatch
from dsaccum.watch.communication import reduced_early
from dsaccum.watch.divisor import FIX as DIVISOR_FIX
from dsaccum.watch.divisor import divisors
from dsaccum.watch.fixes import NO_WEIGHTS_FIT, WEIGHTS_SAY, Z_LOSS_FIX, fix_for
from dsaccum.watch.inside_window import seen_inside
from dsaccum.watch.judge import Judged
from dsaccum.watch.memory import memory_evidence
from dsaccum.watch.rows_fed import rows_text
from dsaccum.watch.window_length import by_count, long_windows, one_step_windows, short_windows
from dsaccum.watch.z_loss import z_fault


class Finding:
    """The claims about one window, why they are as they are, and the causes."""

    def __init__(self, judged: Judged) -> None:
        states = claims_of(judged)
        self.claims = WatchClaims(**{name: cast(Any, state) for name, (state, _) in states.items()})
        self.reasons = {name: reason for name, (_, reason) in states.items() if reason}
        failed = {name: self.reasons.get(name, "") for name in self.claims.which("fail")}
        self.causes = _causes(judged, failed)


def _causes(judged: Judged, failed: dict[str, str]) -> list[Cause]:
    if not failed:
        return []
    found = _seen(judged)
    open_claims = set(failed) - _explained(found)
    if open_claims & {"weighting", "gradient"} and (inside := seen_inside(judged)):
        found += inside
        open_claims -= _explained(inside)
    for look in (_uneven_z_loss, one_step_windows, short_windows, long_windows, _by_weights, _by_divisor):
        if open_claims & {"weighting", "gradient"}:
            named = look(judged, failed)
            if named:
                found += named
                open_claims -= _explained(named)
    if any("ranks-not-reduced" in named.candidates for named in found):
        open_claims.discard("clipping")  # norms are taken over all ranks
    if "replicas" in open_claims:
        found.append(Named(("ranks-drift-apart",), {}, failed["replicas"]))
        open_claims.discard("replicas")
    if "clipping" in open_claims:
        found.append(clipping_mismatch(judged, failed["clipping"]))
        open_claims -= {"clipping", "update"}
    if "update" in open_claims and judged.count_offset is not None:
        found.append(Named(("optimizer-count-offset",), {"ahead_by": judged.count_offset}))
        open_claims.discard("update")
    if "communication" in open_claims and (early := reduced_early(judged.window)):
        sizes = [each.gradient_bytes for each in early.measured.traffic]
        found.append(Named((REDUCED_EVERY_MICRO_STEP,), {"rank": early.rank, "gradient_bytes": sizes}))
        open_claims.discard("communication")
    if "memory" in open_claims and (evidence := memory_evidence(judged.window)):
        found.append(Named((ACTIVATIONS_KEPT,), evidence, failed["memory"]))
        open_claims.discard("memory")
    if open_claims:
        found.append(Named((UNKNOWN,), {"failed": {claim: failed[claim] for claim in sorted(open_claims)}}))
    return [_cause(judged, each, identifier) for each in found for identifier in each.candidates]


_FED_WRONG = {"samples"}
"""Whose rows they are has no part in what they weigh."""
_EXPLAINS = {"ranks-share-data": _FED_WRONG, "samples-misplaced": _FED_WRONG}
_GRADIENT_WRONG = {"weighting", "gradient", "boundary", "replicas", "update"}


def _explained(found: list[Named]) -> set[str]:
    """Claims that fail for one of these causes."""
    explained = set()
    for named in found:
        explained |= _EXPLAINS.get(named.candidates[0], _GRADIENT_WRONG)
        if named.candidates[0] == "clipped-every-micro-step":
            explained.add("clipping")
    return explained


def _cause(judged: Judged, named: Named, identifier: str) -> Cause:
    advice = ADVICE[identifier]
    facts = judged.facts
    fix = named.fix or fix_for(identifier, facts.framework, facts.kind, advice.fix)
    if identifier == UNKNOWN and named.fix is None:
        shown = any(check.explained for check in judged.weighting or judged.way)
        fix = WEIGHTS_SAY if shown else NO_WEIGHTS_FIT
        if judged.window.ranks[0].micro_batches < judged.window.micro_steps:
            fix = "add the losses of a micro-step up and call backward once: of several, ZeRO 1 and 2 keep the last"
    return Cause(
        id=identifier,
        confidence="certain" if len(named.candidates) == 1 and identifier != UNKNOWN else "ambiguous",
        summary=_summary(judged, named, identifier),
        evidence=named.evidence,
        fix=fix,
    )


def _summary(judged: Judged, named: Named, identifier: str) -> str:
    if identifier == UNKNOWN and named.detail:
        return f"no known mistake, but {named.detail}"
    by_script = identifier == "clipping-mismatch" and judged.facts.zero_stage is None
    summary = CLIPPED_BY_SCRIPT if by_script else ADVICE[identifier].summary
    detail = named.detail or _who_divided(judged, identifier)
    return summary + (f" ({detail})" if detail else "")


def _who_divided(judged: Judged, identifier: str) -> str:
    """For what is about division: the two factors, where an engine has one of them."""
    if identifier not in ("loss-scaled-twice", "loss-not-scaled") or judged.facts.zero_stage is None:
        return ""
    engine = judged.engine[0][0]
    return f"the script's factor is {judged.arriving[0][0] / engine:.3g}, the engine's {engine:.3g}" if engine else ""


def _seen(judged: Judged) -> list[Named]:
    """What needs no pattern."""
    window = judged.window
    found = []
    if window.ranks[0].past_engine:
        found.append(Named(("step-inside-window",), {"after_micro_steps": window.ranks[0].past_engine}))
    else:
        found += by_count(judged)
    if shared := sharing(judged):
        found.append(Named(("ranks-share-data",), {"ranks": list(shared)}, f"ranks {shared[0]} and {shared[1]}"))
    elif pair := repeated(judged):
        found.append(Named(("samples-misplaced",), {"micro_steps": list(pair)}, f"micro-steps {pair[0]} and {pair[1]}"))
    elif (rows := rows_twice(judged)).wrong:
        twice: dict[str, Any] = {"rows": rows.on_ranks, "of": rows.rows, "by_chance": rows.by_chance}
        found.append(Named(("ranks-share-data",), twice, rows_text(rows)))
    tokens = judged.tokens
    if tokens is not None and tokens.misaligned:
        found.append(Named(("fields-misaligned",), {"rows": tokens.misaligned}))
    elif tokens is not None and tokens.on_padding[0]:
        count, share = tokens.on_padding
        found.append(Named(("padding-counted",), {"tokens": count, "share": share}, f"{share:.0%} of the whole weight"))
    if inside := clips_inside(judged):
        shown = {"after_micro_steps": [clip.after for clip in inside], "limit": inside[0].limit}
        found.append(Named(("clipped-every-micro-step",), shown))
    return found


def _uneven_z_loss(judged: Judged, failed: dict[str, str]) -> list[Named]:
    """The cross entropy weighs as is due, and the z-loss beside it does not."""
    tokens, checks = judged.tokens, judged.weighting or []
    if "weighting" not in failed or tokens is None or not all(check.weights_right for check in checks):
        return []
    if (fault := z_fault(tokens.z)) is None or fault[0] != "fail":
        return []
    shown = {"z_loss": [each.coefficient for each in tokens.z]}
    identifier = "mean-of-means" if tokens.z_means else UNKNOWN
    return [Named((identifier,), shown, "in the z-loss: the cross entropy weighs as is due", fix=Z_LOSS_FIX)]


def _by_weights(judged: Judged, failed: dict[str, str]) -> list[Named]:
    """As ``verify`` does it, from the weights that targets are due; else from what arrived."""
    if "weighting" in failed and judged.weighting is not None and judged.weighting_truth is not None:
        named = gradient_causes(_evidence(judged, judged.weighting, judged.weighting_truth))
        nobody_says = judged.facts.accumulation_steps is None and not judged.facts.earlier_windows
        if nobody_says and [each.candidates for each in named] == [("loss-scaled-twice",)]:
            # Or this window is a short one, divided by what a full one holds.
            return [Named(("loss-scaled-twice", "short-window-full-divisor"), named[0].evidence)]
        return named
    if "gradient" in failed:
        return gradient_causes(_evidence(judged, judged.way, judged.way_truth))
    return []


def _by_divisor(judged: Judged, failed: dict[str, str]) -> list[Named]:
    """No mistake that is known: then what was it divided by?"""
    if "weighting" not in failed or judged.weighting is None or judged.tokens is None:
        return []
    readings = [each for rank in judged.window.ranks for each in rank.tokens if each is not None]
    found = divisors(judged.tokens, readings, judged.weighting[0].tolerance)
    if not found:
        return []
    divisor = next(iter(found.values()))
    which = " and ".join(found)
    detail = f"the token losses are divided by {divisor}, which is {which}; {judged.tokens.due} of them are targets"
    return [Named((UNKNOWN,), {"divided_by": found, "targets": judged.tokens.due}, detail, fix=DIVISOR_FIX)]


def _evidence(judged: Judged, checks: list[GradientCheck], truth: WindowTruth) -> CaseEvidence:
    step = StepEvidence(
        step=judged.facts.window,
        choice=cast(Any, None),
        truth=truth,
        counts=judged.counts,
        boundaries=[judged.window.micro_steps],
        applied=True,
        gradients=list(checks),
        vectors=judged.vectors,
        saw=None,
        update=None,
        update_number=judged.facts.window,
        settings=None,
        rates=set(),
        optimizer_step=judged.window.ranks[0].step,
        loss=None,
        loss_bound=0.0,
        sample_faults=[],
        not_finite=[],
        replicas_differing=[],
        frozen_changed=[],
        changed_before=[],
    )
    return CaseEvidence(
        case=judged.case,
        steps=[step],
        start_differing=[],
        additivity=(0.0, ""),
        optimizer=cast(Any, None),
        schedule=cast(Any, None),
        mixed_truth=False,
        replicas_compared=0,
        draws=0.0,
    )
