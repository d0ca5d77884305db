"""What passed, what failed, what was not tested; then the verdict and its causes."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from dsaccum.report.figures import counted, is_or_are
from dsaccum.report.layout import RIGHT, WRONG, labelled, listed
from dsaccum.verification.diagnosis.causes import UNKNOWN
from dsaccum.verification.records.record import Cause, ClaimState, VerifyRecord


def claim_lines(record: VerifyRecord, *, width: int) -> list[Text]:
    """Claims by state, with reasons where they did not pass."""
    passed = record.claims.which("pass")
    return [
        *listed("passed", [", ".join(passed)] if passed else [], width=width),
        *listed("failed", _with_reasons(record, "fail"), width=width, style=WRONG),
        *listed("not tested", _with_reasons(record, "untested"), width=width),
        *listed("not applicable", _with_reasons(record, "not_applicable"), width=width),
    ]


def verdict_lines(record: VerifyRecord, *, width: int) -> list[Text]:
    """The verdict, and for each cause what it is and the smallest fix."""
    lines = labelled(
        "verdict", verdict_text(record), width=width, style=RIGHT if record.verdict == "equivalent" else WRONG
    )
    for number, cause in enumerate(record.causes, start=1):
        lines += _cause_lines(cause, number, len(record.causes), width)
    return lines


def verdict_text(record: VerifyRecord) -> str:
    """In one sentence."""
    batch = record.effective_batch
    if record.verdict is None:
        return f"NONE, nothing is proven either way: {record.why_undecided()}"
    split = (
        f"{counted(batch.accumulation_steps, 'micro-batch', 'es')} of {batch.micro_batch} "
        f"on {counted(batch.world_size, 'rank')}"
    )
    if record.verdict == "equivalent":
        return f"EQUIVALENT: {split} gave the update of one batch of {batch.total}"
    wrong = ", ".join(record.claims.which("fail"))
    split = f"{split} {is_or_are(batch.accumulation_steps)}"
    return f"NOT EQUIVALENT: {split} not one batch of {batch.total}; wrong: {wrong}"


def _cause_lines(cause: Cause, number: int, causes: int, width: int) -> list[Text]:
    label = "cause" if causes == 1 else f"cause {number} of {causes}"
    named = cause.id if cause.id == UNKNOWN else f"{cause.id} ({cause.confidence})"
    return [
        *labelled(label, named, width=width, style=WRONG),
        *labelled("", cause.summary, width=width),
        *labelled("fix", cause.fix, width=width),
    ]


def _with_reasons(record: VerifyRecord, state: ClaimState) -> Iterator[str]:
    for claim in record.claims.which(state):
        reason = record.reasons.get(claim)
        yield f"{claim}: {reason}" if reason else claim
