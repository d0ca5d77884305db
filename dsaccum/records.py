"""What commands leave behind: typed records that become JSON, never over another file and never with NaN."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

Number = float | None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if hasattr(value, "tolist"):  # a number or array of numpy or torch
        return _finite(value.tolist())
    return value


class RecordPart(BaseModel):
    """Frozen; what is no finite number becomes null, because JSON has neither NaN nor infinity."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _only_finite_numbers(cls, data: Any) -> Any:
        return _finite(data)


class Record(RecordPart):
    """A whole record: what stands in one file."""

    def as_json(self) -> str:
        """The record as JSON text: every key, no NaN."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), allow_nan=False, indent=2) + "\n"

    def write(self, path: str | Path) -> None:
        """Write the JSON whole or not at all, never over another file.

        Raises:
            FileExistsError: something stands at ``path``, even if it came only now.
            OSError: it cannot be written.
        """
        write_new(Path(path), self.as_json())

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The record in a file; keys that this version does not know are ignored.

        Raises:
            OSError: it cannot be read.
            ValueError: it holds no such record.
        """
        return cls.model_validate_json(Path(path).read_bytes())


def write_new(path: Path, text: str) -> None:
    """Write a file whole or not at all, never over another one.

    Raises:
        FileExistsError: something stands at ``path``, even if it came only now.
        OSError: it cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        _publish(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _publish(unfinished: Path, path: Path) -> None:
    try:
        os.link(unfinished, path)  # unlike os.replace, refuses in the same instant if somebody was faster
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(f"{path} exists") from None
        os.replace(unfinished, path)
