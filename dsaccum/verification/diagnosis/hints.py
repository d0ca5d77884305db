"""Where to look when something is wrong and no signature fits."""

from __future__ import annotations

from collections.abc import Collection

from dsaccum.verification.comparison.evidence import CaseEvidence
from dsaccum.verification.diagnosis.judge import told_apart
from dsaccum.verification.subject.loops import DSACCUM


def where_to_look(evidence: CaseEvidence, unexplained: Collection[str]) -> str:
    """The hints that the evidence gives on these claims, the most telling first."""
    looks = (("update", _changed), ("loss", _loss), ("samples", _rows))
    hints = [hint for claim, look in looks if claim in unexplained for hint in look(evidence)]
    if evidence.case.loop == DSACCUM:
        hints.append(
            "the loop is dsaccum's own, so look at the config, the model's code and what changes DeepSpeed's: another "
            "ZeRO stage (or optimizer) that is equivalent tells which"
        )
    else:
        hints.append("run it with --loop dsaccum to see whether the loop or the config is at fault")
    return "; ".join(hints)


def _changed(evidence: CaseEvidence) -> list[str]:
    for step in evidence.steps:
        if step.changed_before:
            what = f"{step.changed_before[0]} or its optimizer state was changed before step {step.step}"
            return [f"{what}, outside the optimizer: look for code that writes to parameters or to optimizer states"]
        if step.state_lost:
            what = f"the optimizer's state of {step.state_lost[0]} is lost in step {step.step}"
            return [f"{what}: look for code that writes to optimizer.state, or moves or reloads it"]
    return []


def _loss(evidence: CaseEvidence) -> list[str]:
    """Of our own loop the loss is the experiment's, whatever it logs."""
    if evidence.case.loop == DSACCUM or any(step.changed_before for step in evidence.steps):
        return []
    for step in evidence.steps:
        if step.loss is not None and not step.loss_right:
            what = f"the loop's loss is not the experiment's (step {step.step}: {told_apart(step)})"
            return [f"{what}: look for other targets, as of labels that were changed, or for another term in the loss"]
    return []


def _rows(evidence: CaseEvidence) -> list[str]:
    for step in evidence.steps:
        for fault in step.sample_faults:
            if fault.handed_on:
                place = f"step {step.step}, rank {fault.rank}, micro-step {fault.micro_step}"
                return [f"look at what the loop does to the rows before it hands them to the model ({place})"]
    return []
