"""``dsaccum.bench/1``: memory, time and equality of the update over ways to split one effective batch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import AliasChoices, Field

from dsaccum.records import Number, Record, RecordPart
from dsaccum.verification.records.parts import MemoryByCategory

Word = Literal["accept", "tune", "reject"]
"""Equal updates and less memory; equal updates and no memory saved; updates differ."""


class BenchMemory(RecordPart):
    """The worst rank's window, rows at their full length.

    ``added_bytes`` is what the window needs on top of parameters and optimizer states. ``resident_bytes`` is by how
    much the process grew in another window, as the operating system saw it; ``allocator_bytes`` the peak as CUDA's
    allocator saw it. Null where there is no such witness.
    """

    peak_bytes: int
    added_bytes: int
    by_category: MemoryByCategory
    gradient_buffer_bytes: int
    resident_bytes: int | None = None
    allocator_bytes: int | None = None


class BenchTime(RecordPart):
    """Seconds of a window on the slowest rank, data and exchanges included; one for each window of each round."""

    seconds: list[float]
    median_s: float
    p95_s: float
    tokens_per_s: float


class BenchUpdate(RecordPart):
    """Whether it gave the update of one big batch, as ``dsaccum verify`` tells; ``ratio`` is error / bound at most."""

    verdict: Literal["equivalent", "not_equivalent"] | None
    causes: list[str] = Field(default_factory=list)
    ratio: Number = None
    reason: str | None = None


class CandidateRecord(RecordPart):
    """One split. ``loss`` is the last window's; what a failure left unmeasured is null."""

    accumulation_steps: int
    micro_batch: int
    word: Word | None = None
    reason: str = ""
    failure: str | None = None
    memory: BenchMemory | None = None
    time: BenchTime | None = None
    update: BenchUpdate | None = None
    loss: Number = None


class WorkloadRecord(RecordPart):
    """What was run."""

    model: str
    parameters: int
    sequence_length: int
    precision: str
    zero_stage: int
    data: dict[str, Any] = Field(default_factory=dict)
    rounds: int
    windows: int
    warm_up_windows: int


class BenchRecord(Record):
    """Everything that one ``dsaccum bench`` found out."""

    schema_name: Literal["dsaccum.bench/1"] = Field(
        validation_alias=AliasChoices("schema", "schema_name"),
        serialization_alias="schema",
        default="dsaccum.bench/1",
    )
    label: str | None = None
    word: Word | None = None
    reason: str = ""
    advice: list[str] = Field(default_factory=list)
    world_size: int
    total: int
    configured_accumulation_steps: int
    candidates: list[CandidateRecord]
    workload: WorkloadRecord
    substitutions: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    deepspeed_config: dict[str, Any] = Field(default_factory=dict)
    experiment: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, Any] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    elapsed_s: Number = None
