"""The ways to split one effective batch that are compared."""

from __future__ import annotations

from collections.abc import Sequence

from dsaccum.batch import EffectiveBatch
from dsaccum.config.errors import ConfigError


def candidates(batch: EffectiveBatch, wanted: Sequence[int]) -> list[EffectiveBatch]:
    """One split for each N, smallest N first; W and E stay.

    Args:
        batch: as the JSON has it.
        wanted: the N to try; empty for the powers of two that divide E / W, and the JSON's own N.

    Raises:
        ConfigError: an N does not divide E / W.
    """
    rows = batch.total // batch.world_size
    for steps in wanted:
        if rows % steps:
            raise ConfigError(
                f"does not divide the {rows} samples that each of {batch.world_size} ranks has of E = {batch.total}",
                key="--accum-steps",
                value=steps,
                allowed=", ".join(str(divisor) for divisor in range(1, rows + 1) if rows % divisor == 0),
            )
    chosen = wanted or {batch.accumulation_steps, *_powers_of_two(rows)}
    return [EffectiveBatch(batch.world_size, steps, rows // steps) for steps in sorted(chosen)]


def _powers_of_two(rows: int) -> list[int]:
    powers = [1]
    while rows % (2 * powers[-1]) == 0:
        powers.append(2 * powers[-1])
    return powers


def in_turn(count: int, round_number: int) -> list[int]:
    """The order of a round. The next one runs it backwards, so that a steady drift of the machine hurts all alike."""
    shift = round_number // 2 % count
    order = [*range(shift, count), *range(shift)]
    return order[::-1] if round_number % 2 else order
