"""One cell is tried and judged: from a prepared case to what the record says of it."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from dsaccum.audit.attempt import Attempts, Refused
from dsaccum.audit.cells import Circumstances
from dsaccum.audit.record import CellRecord, CircumstancesRecord
from dsaccum.verification.comparison.evidence import StepEvidence
from dsaccum.verification.progress import SilentProgress
from dsaccum.verification.ranks.failed import RankFailed
from dsaccum.verification.records.record import verdict_of
from dsaccum.verification.verify import Examined, Extent, examine

if TYPE_CHECKING:
    from dsaccum.verification.cases.inputs import PreparedCase
    from dsaccum.verification.ranks.interface import TaskRunner

THE_UPDATE_ALONE = Extent(memory="never", trajectory=False)
"""Memory costs three more engines for each cell; what the update is does not rest on it."""
_BESIDE_THE_UPDATE = frozenset({"communication", "memory"})


def try_cell(way: str, circumstances: CircumstancesRecord, prepared: PreparedCase, pool: TaskRunner) -> CellRecord:
    """Run it on the ranks, and say what it is.

    Args:
        way: its identifier.
        circumstances: of the config.
        prepared: the case.
        pool: of as many ranks as the case wants.
    """
    started = time.perf_counter()
    try:
        found = examine(prepared, Attempts(pool), SilentProgress(), THE_UPDATE_ALONE)
        said = _said(found)
    except Refused as error:
        said = _refused(error)
    except RankFailed as error:  # it hangs, or a process died: nobody refused anything, and there is no verdict
        said = {"outcome": "untested", "detail": str(error)}
    elapsed = time.perf_counter() - started
    return CellRecord(way=way, circumstances=circumstances, elapsed_s=elapsed, **said)


def refused(way: str, circumstances: CircumstancesRecord, reason: str) -> CellRecord:
    """A cell that the installed DeepSpeed has no word for."""
    return CellRecord(way=way, circumstances=circumstances, outcome="refused", detail=reason)


def recorded(circumstances: Circumstances) -> CircumstancesRecord:
    """The same for a record."""
    return CircumstancesRecord(**asdict(circumstances))


def _said(found: Examined) -> dict[str, Any]:
    failed = found.claims.which("fail")
    verdict = verdict_of(found.claims)
    why = "; ".join(f"{claim}: {found.reasons.get(claim, '')}" for claim in failed)
    if verdict is None:
        return {"outcome": "untested", "detail": _open(found)}
    if verdict == "equivalent" or _BESIDE_THE_UPDATE.issuperset(failed):
        return {"outcome": "costly" if failed else "right", "detail": why}
    causes = [cause for cause in found.causes if not _BESIDE_THE_UPDATE.issuperset(cause.evidence.get("failed", "?"))]
    return {
        "outcome": "wrong",
        "causes": list(dict.fromkeys(cause.id for cause in causes)),
        "certain": all(cause.confidence == "certain" for cause in causes),
        "detail": why,
        "weights": next(filter(None, map(_weights_in_words, found.evidence.steps)), ""),
    }


def _open(found: Examined) -> str:
    states = {name: getattr(found.claims, name) for name in ("gradient", "update")}
    return "; ".join(f"{name}: {found.reasons.get(name, state)}" for name, state in states.items() if state != "pass")


def _refused(error: Refused) -> dict[str, Any]:
    raised = error.raised
    if raised.ours:
        return {"outcome": "untested", "detail": f"what DeepSpeed did could not be observed: {raised.line}"}
    return {"outcome": "refused", "detail": raised.line}


def _weights_in_words(step: StepEvidence) -> str:
    """What the micro-batches weighed, where that was wrong and is one number for all, or for each micro-step."""
    check = next((each for each in step.judged if not each.weights_right), None)
    if check is None or check.max_error is None:
        return ""
    due = step.truth.due_in_order
    shares = [None if not d or w is None else w / d for w, d in zip(check.recovered.weights, due, strict=True)]
    by_step = [shares[at : at + len(step.truth.due[0])] for at in range(0, len(shares), len(step.truth.due[0]))]
    levels = [_level(each) for each in by_step]
    if any(level is None for level in levels):
        return ""
    told = [round(cast(float, level), 3) + 0.0 for level in levels]
    if max(told) - min(told) < 0.02:
        return f"every micro-batch weighs {_share(told[0])} of what is due"
    return f"micro-steps weigh {', '.join(map(_share, told))} of what is due"


def _share(level: float) -> str:
    """``1/16``; what is no such fraction has two digits."""
    parts = round(1 / level) if level > 0 else 0
    return f"1/{parts}" if parts > 1 and abs(level * parts - 1) < 0.01 else f"{level:.2g}"


def _level(shares: list[float | None]) -> float | None:
    """The one share of a micro-step's ranks; None where they differ."""
    known = [share for share in shares if share is not None]
    return None if not known or max(known) - min(known) > 0.02 else sum(known) / len(known)
