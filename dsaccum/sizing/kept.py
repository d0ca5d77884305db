"""Micro-batches that memory sufficed for, one file for each run that would need the same memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, Field

from dsaccum.batch import MICRO_BATCH_KEY, STEPS_KEY, TOTAL_KEY
from dsaccum.config.keys import OBSERVERS
from dsaccum.user_cache import cached_file

if TYPE_CHECKING:
    from dsaccum.training.inputs import Inputs
    from dsaccum.training.micro_batch import Known


class Kept(BaseModel):
    """What is in the file."""

    micro_batch: int = Field(ge=1)


def find(inputs: Inputs) -> Known | None:
    """What was kept, and where; None where nothing was, or where it cannot be read."""
    path = _file(inputs)
    if not path.is_file():  # a pipe in its place would never answer
        return None
    with contextlib.suppress(OSError, ValueError):
        return Kept.model_validate_json(path.read_bytes()).micro_batch, f"more did not fit before: {path}"
    return None


def keep(inputs: Inputs, micro_batch: int) -> None:
    """For the next start; that it cannot be written is no reason to stop."""
    path = _file(inputs)
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(Kept(micro_batch=micro_batch).model_dump_json() + "\n")
        draft.replace(path)


def _file(inputs: Inputs) -> Path:
    """Named after all that memory depends on, but how E is split."""
    return cached_file("micro_batch", hashlib.sha256(json.dumps(_circumstances(inputs)).encode()).hexdigest()[:32])


def _circumstances(inputs: Inputs) -> list[Any]:
    experiment, config = inputs.experiment.model_dump(mode="json"), inputs.deepspeed.config
    free = {TOTAL_KEY, STEPS_KEY, MICRO_BATCH_KEY, *OBSERVERS}
    return [
        experiment["model"],
        experiment["loss"],
        experiment["data"]["sequence_length"],
        inputs.parameters,
        sorted((key, json.dumps(value, sort_keys=True)) for key, value in config.items() if key not in free),
        inputs.deepspeed.batch.world_size,
        _device(),
        torch.__version__,
    ]


def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory} bytes"
