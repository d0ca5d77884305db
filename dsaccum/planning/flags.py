"""The flags of ``dsaccum plan``. Nothing heavy is imported here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dsaccum.config.errors import ConfigError

_UNITS = {"": 1, "B": 1, **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}} | {
    f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)
}


@dataclass(frozen=True)
class PlanFlags:
    """What is planned.

    Attributes:
        experiment: the YAML.
        effective_batch: E.
        ranks: W.
        memory: bytes for tensors on each rank.
        deepspeed: the JSON to start from; without one, fp32 at the lowest ZeRO stage that fits.
        device: where it would run, ``cpu`` or ``cuda``; None for what this machine has.
        overrides: of the YAML, ``section.key=value``.
        command: the command line, for the record.
        version: of dsaccum, for the record.
    """

    experiment: Path
    effective_batch: int
    ranks: int
    memory: int
    deepspeed: Path | None = None
    device: str | None = None
    overrides: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    version: str = ""


def parse_memory(text: str, *, key: str) -> int:
    """Bytes of ``24GiB``, ``24 GB`` or ``500MiB``.

    Raises:
        ConfigError: it is no amount of memory.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if size < 1:
        fix = f"{key} {found[1] if found and float(found[1]) else 24}GiB"
        raise ConfigError("is no amount of memory", key=key, value=text, allowed="e.g. 24GiB, 80GB, 500MiB", fix=fix)
    return size
