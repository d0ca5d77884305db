"""``dsaccum.plan/1``: what was asked for, what fits, and at which price."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from dsaccum.records import Number, Record, RecordPart


class BatchRecord(RecordPart):
    """E = W x N x B."""

    world_size: int
    micro_batch: int
    accumulation_steps: int
    total: int


class ModelRecord(RecordPart):
    """The model, and the bytes of one sample's logits in float32, T x V x 4: often the largest activation."""

    class_name: str
    parameters: int
    trained: int
    logits_bytes_per_sample: int


class PhaseRecord(RecordPart):
    """The highest moment of a phase, in bytes on the rank that needs most.

    ``by_category``: parameters, gradients, optimizer (masters, states, and what the step needs on the way), buffers
    (what ZeRO reduces and gathers in), activations, logits, data. They add up to it.
    """

    peak_bytes: int
    by_category: dict[str, int]


class SplitRecord(RecordPart):
    """One split of the effective batch, and its peak."""

    micro_batch: int
    accumulation_steps: int
    peak_bytes: int
    phase: str
    phases: dict[str, PhaseRecord]


class PriceRecord(RecordPart):
    """What a way of running costs beside what was asked for.

    ``compute`` is operations of a sample over those asked for. Bytes are those of one optimizer step on one rank,
    handed in to be reduced and gathered.
    """

    compute: Number
    gradient_bytes: int
    parameter_bytes: int


class WayRecord(RecordPart):
    """One way of running the experiment.

    ``best`` is the split with the smallest N that fits, null where none does. ``splits`` are some of all, with their
    peaks, by falling B. ``largest_micro_batch`` need not divide anything. ``short_bytes`` is what is missing at B = 1.
    """

    zero_stage: int
    precision: str
    accumulation_dtype: str
    activation_checkpointing: bool
    reduce_bucket_bytes: int
    changes: list[str] = Field(default_factory=list)
    fits: bool
    best: SplitRecord | None = None
    largest_micro_batch: int = 0
    short_bytes: int = 0
    splits: list[SplitRecord] = Field(default_factory=list)
    price: PriceRecord


class PlanRecord(Record):
    """Everything that one ``dsaccum plan`` found out.

    ``asked`` is the DeepSpeed JSON as given, ``chosen`` what the plan comes to: the same, or, where no JSON was given,
    the lowest ZeRO stage that fits; null where nothing of that fits. ``others`` are ways with one or more changes.
    """

    schema_name: Literal["dsaccum.plan/1"] = Field(
        validation_alias=AliasChoices("schema", "schema_name"), serialization_alias="schema", default="dsaccum.plan/1"
    )
    fits: bool
    experiment: str
    deepspeed: str | None
    device: str
    memory_bytes: int
    effective_batch: BatchRecord | None
    model: ModelRecord
    asked: WayRecord
    chosen: WayRecord | None
    others: list[WayRecord]
    advice: list[str] = Field(default_factory=list)
    written: str | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    command: list[str] = Field(default_factory=list)
    elapsed_s: Number = None
