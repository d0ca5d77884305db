"""``dsaccum.doctor/1``: what was found, for scripts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dsaccum.doctor.finding import Finding, State
from dsaccum.records import Number, Record, RecordPart


class FindingRecord(RecordPart):
    """One thing that was looked at; texts are empty where there is nothing to say."""

    name: str
    found: str
    state: State
    consequence: str
    fix: str

    @classmethod
    def of(cls, finding: Finding) -> FindingRecord:
        """The same, for a record."""
        return cls(**vars(finding))


class DoctorRecord(Record):
    """Everything that one ``dsaccum doctor`` found."""

    schema_name: Literal["dsaccum.doctor/1"] = Field(serialization_alias="schema", default="dsaccum.doctor/1")
    verdict: Literal["ok", "problem"]
    findings: list[FindingRecord]
    versions: dict[str, str | None] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    elapsed_s: Number = None
