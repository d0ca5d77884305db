"""E, N and B: what the JSON states, what the flags override, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from dsaccum.batch import MICRO_BATCH_KEY, STEPS_KEY, TOTAL_KEY, EffectiveBatch, resolve_batch_triangle
from dsaccum.config.errors import ConfigError
from dsaccum.config.keys import AUTO

STEPS_FLAG = "--accum-steps"
MICRO_BATCH_FLAG = "--micro-batch"


@dataclass(frozen=True)
class _Triangle:
    total: int | None
    accumulation_steps: int | None
    micro_batch: int | None


def resolve_batch(
    config: Mapping[str, Any], world_size: int, accumulation_steps: int | None, micro_batch: int | None
) -> tuple[EffectiveBatch, list[str]]:
    """Combine the JSON's three batch keys with the flags; ``"auto"`` counts as not stated.

    The effective batch is what training depends on, so a stated E stays when one flag is given, and the other two
    move: ``--accum-steps`` alone derives B from E and N, ``--micro-batch`` alone derives N from E and B. Both flags
    together say everything, and E is computed anew. Where the JSON states no E, a flag replaces N or B and E follows.

    Args:
        config: the JSON; types are not yet checked.
        world_size: data-parallel ranks (W).
        accumulation_steps: of the flag ``--accum-steps``, or None.
        micro_batch: of the flag ``--micro-batch``, or None.

    Returns:
        The batch, and one line for every number of the JSON that moved because of a flag for another.

    Raises:
        ConfigError: a number is no positive whole number, too few are given, or they do not agree.
    """
    for flag, value in ((STEPS_FLAG, accumulation_steps), (MICRO_BATCH_FLAG, micro_batch)):
        if value is not None and value < 1:
            raise ConfigError("must be at least 1", source=flag, value=value, fix=f"{flag} 1")
    stated = _Triangle(*(_count(config, key) for key in (TOTAL_KEY, STEPS_KEY, MICRO_BATCH_KEY)))
    wanted = _with_flags(stated, accumulation_steps, micro_batch)
    try:
        batch = resolve_batch_triangle(
            world_size,
            total=wanted.total,
            accumulation_steps=wanted.accumulation_steps,
            micro_batch=wanted.micro_batch,
        )
    except ValueError as error:
        raise ConfigError(str(error) + _hint(stated, wanted, accumulation_steps, micro_batch)) from None
    return batch, _changes(stated, batch, accumulation_steps, micro_batch)


def leaves_micro_batch_open(config: Mapping[str, Any], accumulation_steps: int | None, micro_batch: int | None) -> bool:
    """Whether B is ``"auto"`` and nothing says N: then E alone is given, and memory decides."""
    unsaid = config.get(STEPS_KEY, AUTO) == AUTO and accumulation_steps is None and micro_batch is None
    return unsaid and config.get(MICRO_BATCH_KEY) == AUTO and config.get(TOTAL_KEY, AUTO) != AUTO


def _with_flags(stated: _Triangle, accumulation_steps: int | None, micro_batch: int | None) -> _Triangle:
    if accumulation_steps is not None and micro_batch is not None:
        return _Triangle(None, accumulation_steps, micro_batch)
    if accumulation_steps is not None:
        kept = stated.micro_batch if stated.total is None else None
        return _Triangle(stated.total, accumulation_steps, kept)
    if micro_batch is not None:
        kept = stated.accumulation_steps if stated.total is None else None
        return _Triangle(stated.total, kept, micro_batch)
    return stated


def _hint(stated: _Triangle, wanted: _Triangle, accumulation_steps: int | None, micro_batch: int | None) -> str:
    """How the flags bear on the mistake."""
    if stated.total is not None and accumulation_steps is not None:
        return f" ({STEPS_FLAG} alone keeps {TOTAL_KEY}; with {MICRO_BATCH_FLAG} too it is computed anew)"
    if stated.total is not None and micro_batch is not None:
        return f" ({MICRO_BATCH_FLAG} alone keeps {TOTAL_KEY}; with {STEPS_FLAG} too it is computed anew)"
    if sum(number is not None for number in astuple(wanted)) > 1:
        return ""
    missing = [
        flag
        for flag, number in (
            (f"{STEPS_FLAG} N", wanted.accumulation_steps),
            (f"{MICRO_BATCH_FLAG} B", wanted.micro_batch),
        )
        if number is None
    ]
    return f", or pass {' '.join(missing)}"


def _changes(
    stated: _Triangle, batch: EffectiveBatch, accumulation_steps: int | None, micro_batch: int | None
) -> list[str]:
    """What moved without being named by a flag: that may come as a surprise."""
    followers = (
        (TOTAL_KEY, stated.total, batch.total, False),
        (STEPS_KEY, stated.accumulation_steps, batch.accumulation_steps, accumulation_steps is not None),
        (MICRO_BATCH_KEY, stated.micro_batch, batch.micro_batch, micro_batch is not None),
    )
    return [
        f"{key} is {new} with the flags, not {old} as in the file"
        for key, old, new, asked_for in followers
        if not asked_for and old not in (None, new)
    ]


def _count(config: Mapping[str, Any], key: str) -> int | None:
    if key not in config or config[key] == AUTO:
        return None
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError("is no positive whole number", key=key, value=value, fix=f'"{key}": {_likely_count(value)}')
    return value


def _likely_count(value: Any) -> int:
    try:
        return max(1, int(value or 1))
    except (TypeError, ValueError):
        return 1
