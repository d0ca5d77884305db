"""``dsaccum.audit/1``: what the installed DeepSpeed does in which circumstances, and with a user's own config."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, Field, computed_field

from dsaccum.records import Number, Record, RecordPart

Outcome = Literal["right", "costly", "wrong", "refused", "untested"]
"""The big batch's update; that, with more communication than is due; another update; DeepSpeed raised; no verdict."""


class CircumstancesRecord(RecordPart):
    """What the JSON says. ``clipping`` is off, on, or absent where the key is left out, which reads as off."""

    zero_stage: int
    precision: str
    optimizer: str
    accumulation_steps: int
    clipping: Literal["off", "on", "absent"]


class CellRecord(RecordPart):
    """One way of calling DeepSpeed in one set of circumstances.

    ``causes`` are the identifiers that ``dsaccum verify`` names, ``certain`` whether each is a certainty. ``detail`` is
    why it is not right: the claims that failed, the message of what was raised, or the reason for no verdict;
    ``weights`` what the micro-batches weighed where that was wrong.
    """

    way: str
    circumstances: CircumstancesRecord
    outcome: Outcome
    causes: list[str] = Field(default_factory=list)
    certain: bool = False
    detail: str = ""
    weights: str = ""
    elapsed_s: Number = None


class UntestedRecord(RecordPart):
    """Circumstances that this machine cannot run, and why."""

    circumstance: str
    reason: str


class OwnRecord(RecordPart):
    """The user's own config, with the audit's small model and micro-batch.

    ``good``: the plain ways of calling DeepSpeed are right; null where one has no verdict. ``substitutions`` are those
    that this machine made necessary.
    """

    file: str
    circumstances: CircumstancesRecord
    substitutions: list[str]
    cells: list[CellRecord]
    good: bool | None


class SummaryRecord(RecordPart):
    """Counts over all cells."""

    cells: int
    right: int
    costly: int
    wrong: int
    refused: int
    untested: int


class AuditRecord(Record):
    """Everything that one ``dsaccum audit`` found out. ``ways`` says what each way is."""

    schema_name: Literal["dsaccum.audit/1"] = Field(
        validation_alias=AliasChoices("schema", "schema_name"),
        serialization_alias="schema",
        default="dsaccum.audit/1",
    )
    cover: Literal["pairwise", "full"]
    ranks: int
    ways: dict[str, str]
    cells: list[CellRecord]
    untested: list[UntestedRecord] = Field(default_factory=list)
    own: OwnRecord | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    elapsed_s: Number = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def summary(self) -> SummaryRecord:
        """What the matrix comes down to."""
        outcomes = [cell.outcome for cell in self.cells]
        return SummaryRecord(
            cells=len(outcomes),
            right=outcomes.count("right"),
            costly=outcomes.count("costly"),
            wrong=outcomes.count("wrong"),
            refused=outcomes.count("refused"),
            untested=outcomes.count("untested"),
        )
