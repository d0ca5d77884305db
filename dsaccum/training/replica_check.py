"""While training: are the ranks' copies of the parameters still the same? Asked every few steps, nearly for nothing.

A digest of the parameters rides with the control all-reduce, which a window makes anyway. If all W digests are equal,
their sum is W times each. If not, some rank's own isn't their mean, and it says so in the next exchange; only then the
first tensor that differs is looked for, by a collective of its own.
"""

from __future__ import annotations

import hashlib
from typing import Any

from dsaccum.instruments.replicas import differing_replicas, parameter_checksums

DIGEST_BITS = 40
"""Sums of 8,192 ranks' digests are exact in float64; two that differ agree by chance once in 10^12."""


class ReplicaCheck:
    """One run's checks.

    Args:
        engine: DeepSpeed's.
        every: optimizer steps between two checks; 0 for none.
        world_size: number of ranks; with one there is nothing to compare.
    """

    def __init__(self, engine: Any, every: int, world_size: int) -> None:
        self._engine, self._world_size = engine, world_size
        self._every = every if world_size > 1 else 0
        self._digest, self._step = 0, 0
        self._apart = False

    @property
    def digest(self) -> int:
        """What this rank contributes to the coming exchange; 0 where nothing is compared."""
        return self._digest

    @property
    def apart(self) -> bool:
        """What it says of the exchange before: its own digest was not the mean."""
        return self._apart

    @property
    def pending(self) -> bool:
        """A comparison was made whose outcome the ranks have not yet told one another."""
        return self._digest != 0

    def look(self, step: int) -> None:
        """Take the digest if this step is due. At ZeRO 3 of what ranks hold whole."""
        due = step and self._every and step % self._every == 0
        self._digest = digest_of(parameter_checksums(self._engine)) if due else 0
        self._step = step if due else self._step

    def compare(self, digest_sum: int) -> None:
        """Keep whether this rank's own digest is the mean of all."""
        self._apart = digest_sum != self._world_size * self._digest

    def describe(self) -> str:
        """Name the first tensor that differs. A collective."""
        names = differing_replicas(self._engine)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        what = f"{names[0]}{more}" if names else "some parameters"
        return (
            f"the ranks' copies of {what} differ after step {self._step} (run.replica_check_every): "
            "look for updates made outside the engine, or randomness that is not the same on every rank"
        )


def digest_of(checksums: dict[str, int]) -> int:
    """One number of all, the same on every machine; 1 or more, so that it is never taken for none."""
    text = repr(list(checksums.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) % (2**DIGEST_BITS - 1) + 1
