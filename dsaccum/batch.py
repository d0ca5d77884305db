"""Effective-batch arithmetic: E = W x N x B, slices of a window, its boundary, and the weights inside it.

Pure functions over whole numbers. Nothing is ever floored: what does not divide is refused with the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final

# DeepSpeed's own spelling of E, N and B: what people have in their JSON, hence what messages say.
TOTAL_KEY: Final = "train_batch_size"
STEPS_KEY: Final = "gradient_accumulation_steps"
MICRO_BATCH_KEY: Final = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True)
class EffectiveBatch:
    """The batch that one optimizer step sees, and how it is split.

    Args:
        world_size: data-parallel ranks (W).
        accumulation_steps: micro-steps in a window (N).
        micro_batch: samples of one forward and backward on one rank (B).

    Raises:
        ValueError: one of them is no positive whole number.
    """

    world_size: int
    accumulation_steps: int
    micro_batch: int

    def __post_init__(self) -> None:
        _require_positive("world size", self.world_size)
        _require_positive(STEPS_KEY, self.accumulation_steps)
        _require_positive(MICRO_BATCH_KEY, self.micro_batch)

    @property
    def total(self) -> int:
        """Samples that one optimizer step sees: E = W x N x B."""
        return self.world_size * self.accumulation_steps * self.micro_batch


def resolve_batch_triangle(
    world_size: int,
    *,
    total: int | None = None,
    accumulation_steps: int | None = None,
    micro_batch: int | None = None,
) -> EffectiveBatch:
    """Derive the third of E, N and B from any two; given all three, check that they agree.

    One of them alone is refused. DeepSpeed would take the missing N as 1, and a misspelt key would then turn
    accumulation off without a word.

    Args:
        world_size: data-parallel ranks (W).
        total: samples of one optimizer step (E, ``train_batch_size``).
        accumulation_steps: micro-steps in a window (N, ``gradient_accumulation_steps``).
        micro_batch: samples of one forward on one rank (B, ``train_micro_batch_size_per_gpu``).

    Raises:
        ValueError: a value is no positive whole number, fewer than two are given, E does not divide, or the
            three disagree; the message has the numbers and the values that would do.
    """
    _require_positive("world size", world_size)
    named = {TOTAL_KEY: total, STEPS_KEY: accumulation_steps, MICRO_BATCH_KEY: micro_batch}
    given = {key: value for key, value in named.items() if value is not None}
    for key, value in given.items():
        _require_positive(key, value)
    ranks = _counted(world_size, "rank")

    if accumulation_steps is not None and micro_batch is not None:
        batch = EffectiveBatch(world_size, accumulation_steps, micro_batch)
        if total not in (None, batch.total):
            product = f"{ranks} x {_counted(accumulation_steps, 'step')} x {micro_batch} = {batch.total}"
            raise ValueError(
                f"{TOTAL_KEY} {total} is not {product}; write {batch.total}, or leave one of the three keys out"
            )
        return batch
    if total is not None and accumulation_steps is not None:
        factors = f"{ranks} x {_counted(accumulation_steps, 'step')} x B for any whole B"
        return EffectiveBatch(
            world_size, accumulation_steps, _exact_quotient(total, world_size * accumulation_steps, factors)
        )
    if total is not None and micro_batch is not None:
        factors = f"{ranks} x N steps x {micro_batch} for any whole N"
        return EffectiveBatch(world_size, _exact_quotient(total, world_size * micro_batch, factors), micro_batch)
    raise ValueError(_missing_message(given))


def slice_micro_batch(batch: Mapping[str, Any], index: int, accumulation_steps: int) -> dict[str, Any]:
    """Rows of micro-batch ``index``, the same range in every field.

    Args:
        batch: one rank's samples of a window; tensors (or arrays) that are aligned in the first dimension.
        index: which micro-batch, from 0.
        accumulation_steps: how many micro-batches the rows are divided into (N).

    Returns:
        The same keys with rows [index B, (index + 1) B), B = rows / N; views wherever slicing gives views.

    Raises:
        ValueError: no field, a field without rows, misaligned fields, or rows that N does not divide.
        IndexError: ``index`` is not in [0, N).
    """
    _require_positive("accumulation_steps", accumulation_steps)
    _require_whole("index", index)
    if not 0 <= index < accumulation_steps:
        raise IndexError(
            f"micro-batch {index} of a window of {accumulation_steps}: must be 0 to {accumulation_steps - 1}"
        )
    rows = _common_rows(batch)
    if rows == 0 or rows % accumulation_steps:
        raise ValueError(f"{rows} rows do not divide into {accumulation_steps} micro-batches")
    size = rows // accumulation_steps
    return {name: field[index * size : (index + 1) * size] for name, field in batch.items()}


def is_update_boundary(completed: int, accumulation_steps: int) -> bool:
    """Whether the optimizer steps now, after ``completed`` micro-steps in all (never after none).

    Raises:
        ValueError: ``completed`` is negative, or ``accumulation_steps`` not positive.
    """
    _require_positive("accumulation_steps", accumulation_steps)
    _require_whole("completed", completed)
    if completed < 0:
        raise ValueError(f"completed micro-steps must not be negative, not {completed}")
    return completed > 0 and completed % accumulation_steps == 0


def micro_batch_weights(target_counts: Sequence[int]) -> list[float]:
    """Weight of each micro-batch's mean gradient in the window's: n_i / sum_j n_j.

    Args:
        target_counts: target tokens of each micro-batch, on all ranks alike.

    Raises:
        ValueError: no micro-batch, a negative count, or no target token at all.
    """
    for position, count in enumerate(target_counts):
        _require_whole(f"target count {position}", count)
        if count < 0:
            raise ValueError(f"target count {position} must not be negative, not {count}")
    window_targets = sum(target_counts)
    if window_targets == 0:
        raise ValueError(f"no target token in {_counted(len(target_counts), 'micro-batch', 'es')}: there is no mean")
    return [count / window_targets for count in target_counts]


def _exact_quotient(total: int, unit: int, factors: str) -> int:
    if total % unit == 0:
        return total // unit
    below = total - total % unit
    nearest = f"{below} or {below + unit}" if below else str(unit)
    raise ValueError(f"{TOTAL_KEY} {total} is not {factors}; nearest: {nearest}")


def _missing_message(given: Mapping[str, int]) -> str:
    if not given:
        return f'no batch size is given; add "{STEPS_KEY}": N and "{MICRO_BATCH_KEY}": B'
    [(key, value)] = given.items()
    missing = f'"{MICRO_BATCH_KEY}": B' if key == STEPS_KEY else f'"{STEPS_KEY}": N'
    return f"{key} {value} alone does not say how a window is split; add {missing}"


def _common_rows(batch: Mapping[str, Any]) -> int:
    if not batch:
        raise ValueError("the batch has no field")
    rows = {}
    for name, field in batch.items():
        try:
            rows[name] = len(field)
        except TypeError:
            raise ValueError(f"field {name!r} has no rows: {type(field).__name__} without a first dimension") from None
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise ValueError(f"fields are not aligned in the first dimension: {listed}")
    return next(iter(rows.values()))


def _require_whole(name: str, value: object) -> None:
    # bool is an int to Python, and True would pass for one step.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, not {value!r}")


def _require_positive(name: str, value: Any) -> None:
    _require_whole(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
