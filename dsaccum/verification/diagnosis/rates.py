"""The learning rate behind an update, which may be another than the one that the parameter group shows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsaccum.reference_optimizers import NotRebuilt
from dsaccum.verification.comparison.evidence import CaseEvidence, StepEvidence, due_hypothesis
from dsaccum.verification.comparison.hypothesis import Hypothesis
from dsaccum.verification.comparison.update_check import check_update

NEAR = (1, -1, 2, -2)
"""Offsets of the schedule that are looked for, in updates."""


@dataclass(frozen=True)
class UsedRate:
    """One step whose update fits with another rate."""

    step: int
    used: float
    due: float


def rates_behind_updates(evidence: CaseEvidence) -> list[UsedRate]:
    """Where one factor on the rate explains every wrong update; empty where it doesn't, or none is wrong."""
    used = []
    for step in evidence.steps:
        if step.update is None or step.update.passed:
            continue
        hypothesis, ratio = _due(evidence, step), step.update.ratio
        if hypothesis is None or ratio is None or ratio <= 0:
            return []
        due = hypothesis.settings.learning_rate
        if not _fits(
            evidence, step, replace(hypothesis, settings=replace(hypothesis.settings, learning_rate=due * ratio))
        ):
            return []
        used.append(UsedRate(step.step, due * ratio, due))
    return used


def offset_behind_updates(evidence: CaseEvidence) -> int | None:
    """So many updates later is where the schedule has the rates of all updates, right ones included."""
    if isinstance(evidence.schedule, NotRebuilt):
        return None
    updated = [step for step in evidence.steps if step.update is not None]
    for offset in NEAR:
        for step in updated:
            hypothesis = _due(evidence, step)
            settings = evidence.schedule(max(step.update_number + offset, 1))
            if hypothesis is None or not _fits(evidence, step, replace(hypothesis, settings=settings)):
                break
        else:
            return offset
    return None


def _due(evidence: CaseEvidence, step: StepEvidence) -> Hypothesis | None:
    if step.settings is None or step.optimizer_step is None:
        return None
    return due_hypothesis(step.saw, step.settings, step.update_number, step.optimizer_step, step.truth, evidence.case)


def _fits(evidence: CaseEvidence, step: StepEvidence, hypothesis: Hypothesis) -> bool:
    if isinstance(evidence.optimizer, NotRebuilt) or step.optimizer_step is None:
        return False
    return check_update(step.optimizer_step, evidence.optimizer, hypothesis).passed
