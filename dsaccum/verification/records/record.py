"""The verify record: what was measured, in the schema ``dsaccum.verify/1`` that other people's scripts read.

Every key is always there; ``null`` says that it was not measured. Readers ignore keys that they don't know.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import AliasChoices, Field, model_validator

from dsaccum.records import Number, Record, RecordPart
from dsaccum.verification.records.parts import (
    CommunicationRecord,
    GradientRecord,
    LossRecord,
    Matrix,
    MemoryByCategory,
    MemoryRecord,
    MemoryRun,
    MicroStepRecord,
    NormRecord,
    OptimizerSawRecord,
    StepRecord,
    TensorOff,
    TrajectoryRecord,
    UpdateRecord,
    WeightsRecord,
)

__all__ = [
    "Cause",
    "ClaimState",
    "Claims",
    "CommunicationRecord",
    "EffectiveBatchRecord",
    "GradientRecord",
    "LossRecord",
    "Matrix",
    "MemoryByCategory",
    "MemoryRecord",
    "MemoryRun",
    "MicroStepRecord",
    "ModelRecord",
    "NormRecord",
    "Number",
    "OptimizerSawRecord",
    "ResumedRecord",
    "SplitRecord",
    "StepRecord",
    "TensorOff",
    "TrajectoryRecord",
    "UpdateRecord",
    "Verdict",
    "VerifyRecord",
    "WeightsRecord",
    "verdict_of",
]

ClaimState = Literal["pass", "fail", "untested", "not_applicable"]
Verdict = Literal["equivalent", "not_equivalent"]


class ClaimStates(RecordPart):
    """Claims by name, each with its state."""

    def which(self, state: ClaimState) -> list[str]:
        """Names of the claims in this state, in the order of the schema."""
        return [name for name in type(self).model_fields if getattr(self, name) == state]


class Claims(ClaimStates):
    """What was held to be true, each by itself."""

    gradient: ClaimState = "untested"
    clipping: ClaimState = "untested"
    update: ClaimState = "untested"
    loss: ClaimState = "untested"
    schedule: ClaimState = "untested"
    samples: ClaimState = "untested"
    replicas: ClaimState = "untested"
    communication: ClaimState = "untested"
    memory: ClaimState = "untested"


def verdict_of(claims: Claims) -> Verdict | None:
    """The verdict that follows from the claims; nothing else enters.

    ``equivalent`` when no claim fails and gradient and update both pass; ``not_equivalent`` when one fails. None when
    nothing failed and gradient or update was not tested, as with an optimizer that has no reference: that proves
    nothing either way. The command then ends with exit code 3.
    """
    if claims.which("fail"):
        return "not_equivalent"
    return "equivalent" if claims.gradient == claims.update == "pass" else None


class Cause(RecordPart):
    """One explanation of a failed claim; ``id`` is one of the fault identifiers."""

    id: str
    confidence: Literal["certain", "ambiguous"]
    summary: str
    evidence: dict[str, Any] = Field(default_factory=dict)
    fix: str


class EffectiveBatchRecord(RecordPart):
    """E = W x N x B."""

    world_size: int
    micro_batch: int
    accumulation_steps: int
    total: int


class ModelRecord(RecordPart):
    """What was trained."""

    class_name: str = Field(
        validation_alias=AliasChoices("class", "class_name"), serialization_alias="class", default=""
    )
    parameters: int | None = None


class SplitRecord(RecordPart):
    """How a run split its effective batch."""

    world_size: int
    accumulation_steps: int
    micro_batch: int


class ResumedRecord(RecordPart):
    """What a verification of a continued run went on from.

    ``updates`` are those applied before, by the run's metrics. ``compared`` is the number of parameters whose weights
    and optimizer states (``states``) were compared with the checkpoint's files, to the bit; ``differing`` names those
    that were not the same, by state. ``stream_offset`` is by how many samples the stream was entered too late, where
    that explains every row.
    """

    directory: str
    checkpoint: str
    step: int
    updates: int
    samples: int
    split_before: SplitRecord
    versions_before: dict[str, str] = Field(default_factory=dict)
    compared: int | None = None
    states: list[str] = Field(default_factory=list)
    differing: dict[str, list[str]] = Field(default_factory=dict)
    stream_offset: int | None = None


class VerifyRecord(Record):
    """Everything that one ``dsaccum verify`` found out.

    Beyond the contract's keys: ``reasons`` (why a claim failed, is untested or not applicable), ``warnings``, and
    what was verified. ``unavailable`` are those substitutions that this machine made necessary. ``experiment`` and
    ``deepspeed_config`` are as they were resolved, ``fault`` is an injected one. ``resumed`` is null where nothing was
    continued.

    Raises:
        ValueError: ``verdict`` is not what ``verdict_of(claims)`` says.
    """

    schema_name: Literal["dsaccum.verify/1"] = Field(
        validation_alias=AliasChoices("schema", "schema_name"),
        serialization_alias="schema",
        default="dsaccum.verify/1",
    )
    verdict: Verdict | None
    loop: str
    claims: Claims
    reasons: dict[str, str] = Field(default_factory=dict)
    causes: list[Cause] = Field(default_factory=list)
    effective_batch: EffectiveBatchRecord
    model: ModelRecord = ModelRecord()
    precision: str | None = None
    accumulation_dtype: str | None = None
    zero_stage: int | None = None
    truth: Literal["float64", "mixed", "float32"] | None = None
    substitutions: list[str] = Field(default_factory=list)
    unavailable: list[str] = Field(default_factory=list)
    remedies: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    fault: str | None = None
    resumed: ResumedRecord | None = None
    steps: list[StepRecord] = Field(default_factory=list)
    trajectory: TrajectoryRecord = TrajectoryRecord()
    communication: CommunicationRecord = CommunicationRecord()
    memory: MemoryRecord = MemoryRecord()
    experiment: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    elapsed_s: Number = None

    @model_validator(mode="after")
    def _verdict_follows_from_claims(self) -> Self:
        if self.verdict != verdict_of(self.claims):
            raise ValueError(f"verdict {self.verdict!r} does not follow from the claims")
        return self

    def open_questions(self) -> list[str]:
        """What ``--strict`` does not let pass: what this machine cannot run, and what was left untested."""
        untested = [
            _with_reason(f"{claim} is untested", self.reasons.get(claim)) for claim in self.claims.which("untested")
        ]
        return [f"substituted: {each}" for each in self.unavailable] + untested

    def why_undecided(self) -> str:
        """Why there is no verdict: which of gradient and update did not pass a test, and the reason."""
        words = {"untested": "untested", "not_applicable": "not applicable"}
        open_claims = {name: getattr(self.claims, name) for name in ("gradient", "update")}
        return "; ".join(
            _with_reason(f"{name} is {words[state]}", self.reasons.get(name))
            for name, state in open_claims.items()
            if state in words
        )


def _with_reason(clause: str, reason: str | None) -> str:
    return f"{clause}: {reason}" if reason else clause
