"""What a record comes down to, in a terminal's words: it stands on top of its page, and of a page of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsaccum.report import audit_matrix, conclusion, fault_matrix, plan, train_run, watch
from dsaccum.report.other_record import OtherRecord
from dsaccum.verification.records.record import Cause

State = Literal["right", "wrong", "open"]
_OF_VERDICT: dict[str | None, State] = {"equivalent": "right", "not_equivalent": "wrong", None: "open"}


@dataclass(frozen=True)
class Conclusion:
    """One record's.

    Attributes:
        kind: the command that made it.
        state: nothing to do; something is wrong; neither is known, or it is no matter of right and wrong.
        text: one sentence, its first word in capitals.
        causes: each with its fix.
    """

    kind: str
    state: State
    text: str
    causes: Sequence[Cause] = ()

    @property
    def title(self) -> str:
        """Of a page."""
        return f"{self.kind}: {self.text.partition(':')[0]}"


def of_verify(record: Any) -> Conclusion:
    """The verdict."""
    text = conclusion.verdict_text(record)
    return Conclusion("dsaccum verify", _OF_VERDICT[record.verdict], text, record.causes)


def of_watch(record: Any) -> Conclusion:
    """Over all windows."""
    return Conclusion(
        "dsaccum.watch", _OF_VERDICT[record.verdict], watch.overall(record), watch.distinct_causes(record)
    )


def of_faults(record: Any) -> Conclusion:
    """How many are caught and named."""
    return Conclusion(
        "dsaccum faults", "right" if fault_matrix.is_sound(record) else "wrong", fault_matrix.in_short(record)
    )


def of_audit(record: Any) -> Conclusion:
    """Of the user's own config where there is one, else of all cells."""
    good = not record.summary.wrong if record.own is None else record.own.good
    states: dict[bool | None, State] = {True: "right", False: "wrong", None: "open"}
    return Conclusion("dsaccum audit", states[good], audit_matrix.in_short(record))


def of_bench(record: Any) -> Conclusion:
    """Whether it is worth it."""
    states: dict[str | None, State] = {"accept": "right", "reject": "wrong"}
    return Conclusion(
        "dsaccum bench", states.get(record.word, "open"), f"{(record.word or 'none').upper()}: {record.reason}"
    )


def of_train(record: Any) -> Conclusion:
    """How the run ended."""
    states: dict[str, State] = {"finished": "right", "failed": "wrong"}
    return Conclusion("training run", states.get(record.status, "open"), train_run.in_short(record))


def of_plan(record: Any) -> Conclusion:
    """Whether it fits, or what would."""
    return Conclusion("dsaccum plan", "right" if record.fits else "wrong", plan.in_short(record))


def of_other(record: OtherRecord) -> Conclusion:
    """Its verdict, if it has one."""
    states: dict[str | None, State] = {"ok": "right", "problem": "wrong"}
    return Conclusion(record.kind, states.get(record.verdict, "open"), (record.verdict or "record").upper())


BY_SCHEMA: dict[str, Callable[[Any], Conclusion]] = {
    "dsaccum.verify/1": of_verify,
    "dsaccum.watch/1": of_watch,
    "dsaccum.faults/1": of_faults,
    "dsaccum.audit/1": of_audit,
    "dsaccum.bench/1": of_bench,
    "dsaccum.train/1": of_train,
    "dsaccum.plan/1": of_plan,
    "dsaccum.doctor/1": of_other,
}
"""Schemas that have a template too."""
