"""``checkpoint.json``: what a checkpoint is, beside DeepSpeed's own files; its presence says that it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsaccum.batch import EffectiveBatch
from dsaccum.durable import Written

MANIFEST = "checkpoint.json"


class Counters(BaseModel):
    """Where a run stands at a boundary.

    Attributes:
        step: windows that are done; the next window's index, since windows count from 0.
        samples: seen by all ranks so far.
        tokens: target tokens seen so far.
        skipped_in_a_row: windows discarded since the last that was applied.
    """

    model_config = ConfigDict(frozen=True)

    step: int = Field(default=0, ge=0)
    samples: int = Field(default=0, ge=0)
    tokens: int = Field(default=0, ge=0)
    skipped_in_a_row: int = Field(default=0, ge=0)


class StreamOrigin(BaseModel):
    """Where the windows of this effective batch begin in the stream of samples.

    Attributes:
        window: the first of them; 0 unless the effective batch was changed in mid-run.
        position: samples of the stream before it, those left out at an epoch's end included.
    """

    model_config = ConfigDict(frozen=True)

    window: int = Field(default=0, ge=0)
    position: int = Field(default=0, ge=0)


class Split(BaseModel):
    """How the effective batch was split."""

    model_config = ConfigDict(frozen=True)

    world_size: int
    accumulation_steps: int
    micro_batch: int

    @classmethod
    def of(cls, batch: EffectiveBatch) -> Split:
        """As these numbers."""
        return cls(
            world_size=batch.world_size, accumulation_steps=batch.accumulation_steps, micro_batch=batch.micro_batch
        )

    @property
    def total(self) -> int:
        """E = W x N x B."""
        return self.world_size * self.accumulation_steps * self.micro_batch


class Manifest(BaseModel):
    """All that DeepSpeed's own checkpoint leaves out, and what each file held when it was written.

    Attributes:
        counters: where the run stood.
        split: how it was split.
        origin: of the windows in the stream.
        zero_stage: of DeepSpeed.
        metrics_bytes: length of ``metrics.jsonl`` with this step's line.
        versions: of the libraries that wrote it.
        files: paths inside the checkpoint.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    schema_name: Literal["dsaccum.checkpoint/1"] = Field(default="dsaccum.checkpoint/1", alias="schema")
    counters: Counters
    split: Split
    origin: StreamOrigin = StreamOrigin()
    zero_stage: int
    metrics_bytes: int
    versions: dict[str, str]
    files: dict[str, Written]

    def as_bytes(self) -> bytes:
        """For the file."""
        return (json.dumps(self.model_dump(mode="json", by_alias=True), indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest | None:
        """Of a checkpoint's directory; None where it isn't whole."""
        try:
            return cls.model_validate_json((checkpoint / MANIFEST).read_bytes())
        except (OSError, ValidationError):
            return None
