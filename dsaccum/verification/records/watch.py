"""The watch record, ``dsaccum.watch/1``: the keys of the verify record where they apply, and what only a script has."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, Field

from dsaccum.records import Number, Record, RecordPart
from dsaccum.verification.records.parts import CommunicationRecord, StepRecord
from dsaccum.verification.records.record import Cause, ClaimState, ClaimStates, ModelRecord, Verdict


class WatchClaims(ClaimStates):
    """What was held to be true of a window.

    ``weighting``: every target token of the window on all ranks weighs the same, and they add up to 1. ``gradient``:
    whatever arrived at the micro-batches' losses reached the optimizer, averaged over the ranks, nothing lost and
    nothing added. ``communication``: no gradient crosses the wire before the boundary where none is due (ZeRO 0 and 1).
    ``memory``: what stays alive from one micro-step to the next does not grow. The others are as in the verify record.
    """

    weighting: ClaimState = "untested"
    gradient: ClaimState = "untested"
    boundary: ClaimState = "untested"
    clipping: ClaimState = "untested"
    update: ClaimState = "untested"
    samples: ClaimState = "untested"
    replicas: ClaimState = "untested"
    communication: ClaimState = "untested"
    memory: ClaimState = "untested"

    @property
    def verdict(self) -> Verdict | None:
        """``equivalent`` when weighting and gradient pass and nothing fails; None where that was not told."""
        if self.which("fail"):
            return "not_equivalent"
        return "equivalent" if self.weighting == self.gradient == "pass" else None


class TokenWeightsRecord(RecordPart):
    """Weights of the window's target tokens at the optimizer: ``sum`` is due to be 1, each to be ``expected``."""

    sum: Number = None
    minimum: Number = None
    maximum: Number = None
    expected: Number = None
    targets: int | None = None
    on_padding: int | None = None
    uneven_micro_batches: int | None = None
    remainder: Number = None
    tolerance: Number = None
    loss: str | None = None
    histogram: list[tuple[Number, int]] = Field(default_factory=list)
    reason: str | None = None


class DividedBy(RecordPart):
    """Who made a micro-batch's weight what it is.

    ``script``: what arrived at its loss from the script or trainer, as a mean over micro-batches (1 for a mean loss
    handed on as it is); ``engine``: the factor of the engine; ``ranks``: that of accumulation and reduction (1 / W);
    ``after_backward``: what a script multiplied all gradients by before the optimizer's step, None for nothing.
    """

    script: Number = None
    engine: Number = None
    ranks: Number = None
    after_backward: Number = None


class EffectiveBatchAsRun(RecordPart):
    """What really was in the window, and what the config says of it."""

    world_size: int
    micro_batch: int | None = None
    accumulation_steps: int
    total: int
    targets: int | None = None
    configured_accumulation_steps: int | None = None
    configured_micro_batch: int | None = None


class MicroStepMemory(RecordPart):
    """Bytes of tensors that operations made: alive when its first forward begins, and what more at its backward."""

    micro_step: int
    before_bytes: int | None = None
    activation_bytes: int | None = None


class WindowMemory(RecordPart):
    """From the beginning of micro-step 2 to that of the last; nothing of the watch's own is counted."""

    per_micro_step: list[MicroStepMemory] = Field(default_factory=list)
    growth_bytes: int | None = None
    allowed_bytes: int | None = None
    reason: str | None = None


class WindowRecord(RecordPart):
    """One window of one engine or optimizer."""

    window: int
    verdict: Verdict | None = None
    claims: WatchClaims = WatchClaims()
    reasons: dict[str, str] = Field(default_factory=dict)
    causes: list[Cause] = Field(default_factory=list)
    effective_batch: EffectiveBatchAsRun
    token_weights: TokenWeightsRecord = TokenWeightsRecord()
    divided_by: DividedBy = DividedBy()
    arriving: list[list[Number]] | None = None
    step: StepRecord
    communication: CommunicationRecord = CommunicationRecord()
    memory: WindowMemory = WindowMemory()
    truth: str | None = None
    notes: list[str] = Field(default_factory=list)


class WatchedRecord(RecordPart):
    """One engine, or one optimizer without an engine."""

    number: int
    kind: str
    framework: str = ""
    model: ModelRecord = ModelRecord()
    trained_parameters: int | None = None
    precision: str | None = None
    accumulation_dtype: str | None = None
    zero_stage: int | None = None
    windows: list[WindowRecord] = Field(default_factory=list)


class WatchRecord(Record):
    """Everything that one run's watch found out. ``verdict`` is the worst of all windows of all engines."""

    schema_name: Literal["dsaccum.watch/1"] = Field(
        validation_alias=AliasChoices("schema", "schema_name"),
        serialization_alias="schema",
        default="dsaccum.watch/1",
    )
    verdict: Verdict | None = None
    engines: list[WatchedRecord] = Field(default_factory=list)
    messages: list[str] = Field(default_factory=list)
    unproven: list[str] = Field(default_factory=list)
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    elapsed_s: Number = None


def worst(verdicts: list[Verdict | None]) -> Verdict | None:
    """Of several: not equivalent where one is, equivalent where all are."""
    if "not_equivalent" in verdicts:
        return "not_equivalent"
    return "equivalent" if verdicts and all(each == "equivalent" for each in verdicts) else None
