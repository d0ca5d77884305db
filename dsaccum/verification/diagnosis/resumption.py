"""Causes in what a run went on from: weights, optimizer states, schedule, the place in the stream of samples."""

from __future__ import annotations

import math
from typing import Any

from dsaccum.reference_optimizers import NotRebuilt
from dsaccum.verification.comparison.evidence import SCHEDULE_TOLERANCE, CaseEvidence
from dsaccum.verification.diagnosis.named import Named

SHOWN = 20


def weights_not_restored(evidence: CaseEvidence) -> list[Named]:
    """Some weights were not the checkpoint's before the first step."""
    restored = evidence.restored
    if restored is None or not restored.weights:
        return []
    shown: dict[str, Any] = {"parameters": restored.weights[:SHOWN], "of": restored.parameters}
    return [Named(("weights-not-restored",), shown, _counted(restored.weights))]


def optimizer_state_not_restored(evidence: CaseEvidence) -> list[Named]:
    """Some moments or counts were not."""
    restored = evidence.restored
    if restored is None or not restored.optimizer:
        return []
    shown = {state: names[:SHOWN] for state, names in restored.optimizer.items()}
    lost = [state for state in restored.optimizer if state in restored.lost]
    said = [
        f"{state} of {_counted(names)}{' is 0' if state in lost else ''}" for state, names in restored.optimizer.items()
    ]
    return [Named(("optimizer-state-not-restored",), {"states": shown, "lost": lost}, "; ".join(said))]


def schedule_not_restored(evidence: CaseEvidence) -> list[Named]:
    """The rates are those of a run's first updates; with one that was 0 before it began, those of the second on."""
    case, schedule = evidence.case, evidence.schedule
    known = [step for step in evidence.steps if step.settings is not None and len(step.rates) == 1]
    if case.resumed is None or isinstance(schedule, NotRebuilt) or all(step.schedule_right for step in known):
        return []
    rates = [next(iter(step.rates)) for step in known]
    for later in (0, 1):
        anew = [schedule(step.update_number - case.updates_before + later).learning_rate for step in known]
        if all(
            math.isclose(*pair, rel_tol=SCHEDULE_TOLERANCE, abs_tol=1e-30) for pair in zip(rates, anew, strict=True)
        ):
            due = [step.settings.learning_rate for step in known if step.settings is not None]
            shown = {"rates": rates, "due": due, "updates_before": case.updates_before}
            detail = f"step {known[0].step}: used {rates[0]:.4g}, as at update {1 + later}; due {due[0]:.4g}"
            return [Named(("schedule-not-restored",), shown, detail)]
    return []


def stream_position_not_restored(evidence: CaseEvidence) -> list[Named]:
    """One offset in the stream explains every row that was fed."""
    offset = evidence.stream_offset
    if offset is None:
        return []
    total = evidence.case.batch.total
    windows = f", {abs(offset) // total} windows" if offset % total == 0 and abs(offset) > total else ""
    windows = ", one window" if abs(offset) == total else windows
    samples = f"{abs(offset)} sample{'s' if abs(offset) > 1 else ''}{windows}"
    detail = f"{samples} too {'late' if offset > 0 else 'early'}"
    return [Named(("stream-position-not-restored",), {"samples_too_late": offset}, detail)]


def _counted(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
