"""``dsaccum.faults/1``: which faults were caught in which settings, and whether they were called by their names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, Field, computed_field

from dsaccum.records import Number, Record, RecordPart

Outcome = Literal["named", "ambiguous", "unnamed", "misnamed", "stopped", "missed"]
"""Caught and called by its name alone; as one of several candidates; without a name; by a wrong one; by an error
before there was a verdict. Or not caught."""

UsualCheck = Literal["caught", "missed"]
"""Whether comparing parameters after some steps of AdamW sees a difference."""


class SettingRecord(RecordPart):
    """One way of running."""

    ranks: int
    accumulation_steps: int
    zero_stage: int
    packing: Literal["packed", "ragged"]


class CellRecord(RecordPart):
    """One fault in one setting.

    ``causes`` are the identifiers that were named, ``certain`` whether as a certainty. ``usual_check`` is null where
    there were no parameters to compare.
    """

    fault: str
    setting: SettingRecord
    outcome: Outcome
    causes: list[str] = Field(default_factory=list)
    certain: bool = False
    detail: str = ""
    usual_check: UsualCheck | None = None
    elapsed_s: Number = None


class CleanRecord(RecordPart):
    """The same setting without a fault: everything but ``equivalent`` is a false alarm."""

    setting: SettingRecord
    verdict: Literal["equivalent", "not_equivalent"] | None
    causes: list[str] = Field(default_factory=list)
    usual_check: UsualCheck | None = None


class NotApplicableRecord(RecordPart):
    """A fault that cannot show itself in these settings, and why."""

    fault: str
    reason: str
    settings: list[SettingRecord]


class SummaryRecord(RecordPart):
    """Counts over all cells. ``rightly_named`` is a share; a candidate among several counts half."""

    cells: int
    caught: int
    rightly_named: float
    wrongly_named: int
    false_alarms: int
    usual_check_caught: int


class FaultsRecord(Record):
    """Everything that one ``dsaccum faults --run`` found out."""

    schema_name: Literal["dsaccum.faults/1"] = Field(
        validation_alias=AliasChoices("schema", "schema_name"),
        serialization_alias="schema",
        default="dsaccum.faults/1",
    )
    cover: Literal["pairwise", "full"]
    cells: list[CellRecord]
    clean: list[CleanRecord]
    not_applicable: list[NotApplicableRecord]
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    elapsed_s: Number = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def summary(self) -> SummaryRecord:
        """What the matrix comes down to."""
        worth = {"named": 1.0, "ambiguous": 0.5}
        cells = self.cells
        return SummaryRecord(
            cells=len(cells),
            caught=sum(cell.outcome != "missed" for cell in cells),
            rightly_named=sum(worth.get(cell.outcome, 0.0) for cell in cells) / len(cells) if cells else 0.0,
            wrongly_named=sum(cell.outcome == "misnamed" for cell in cells),
            false_alarms=sum(each.verdict != "equivalent" for each in self.clean),
            usual_check_caught=sum(cell.usual_check == "caught" for cell in cells),
        )
