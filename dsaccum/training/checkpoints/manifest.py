"""``checkpoint.json``: what a checkpoint is, beside DeepSpeed's own files; whole only if it has its own checksum."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from dsaccum.batch import EffectiveBatch
from dsaccum.durable import Written

MANIFEST = "checkpoint.json"
_SEAL: Final = "crc32"


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
        """For the file, with a checksum of all values: a wrong one would change the run and tell nobody."""
        values = self.model_dump(mode="json", by_alias=True)
        return (json.dumps({**values, _SEAL: _crc32(values)}, indent=1, allow_nan=False) + "\n").encode()

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Of a checkpoint's directory.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not what was written.
        """
        values = json.loads((checkpoint / MANIFEST).read_bytes())
        if not isinstance(values, dict) or values.pop(_SEAL, None) != _crc32(values):
            raise ValueError("its checksum is that of other values")
        return cls.model_validate(values)


def _crc32(values: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())
