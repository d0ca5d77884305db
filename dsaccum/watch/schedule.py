"""A learning rate that changes inside a window: is the schedule moved on at each micro-step?

The update is that of one big batch at whatever rate it is made, and a schedule may well be counted in micro-batches. So
this is told, and no claim fails for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from dsaccum.report.figures import numbered, scientific
from dsaccum.watch.window import WatchedWindow

SCHEDULE_PER_MICRO_STEP = "schedule-per-micro-step"
Rates = tuple[float, ...]


class RateLog:
    """The rates of all parameter groups, as each micro-step's first forward finds them."""

    def __init__(self) -> None:
        self._at: dict[int, Rates] = {}

    def note(self, micro_step: int, groups: Iterable[dict[str, Any]]) -> None:
        """Of a micro-step, from 1."""
        rates = [group.get("lr") for group in groups]
        self._at[micro_step] = tuple(float(rate) for rate in rates if isinstance(rate, (int, float, Tensor)))

    def of(self, micro_steps: int) -> list[Rates]:
        """By micro-step; empty where one of them was not seen to begin."""
        found = [self._at.get(k) for k in range(1, micro_steps + 1)]
        known = [each for each in found if each]
        return known if len(known) == micro_steps else []


def schedule_notes(window: WatchedWindow) -> list[str]:
    """One, where the rate changed between two micro-steps; a rate that is set right before the step is none."""
    rates = window.ranks[0].rates
    before = changed_before(rates)
    if not before:
        return []
    group = next(g for g in range(len(rates[0])) if len({each[g] for each in rates}) > 1)
    seen = f"{scientific(rates[0][group])} in the first, {scientific(rates[-1][group])} in the last"
    if len(before) < len(rates) - 1:
        return [f"the learning rate changed inside the window, before {numbered('micro-step', before)}: {seen}"]
    return [
        f"{SCHEDULE_PER_MICRO_STEP}: the learning rate changed before each micro-step: {seen}. A schedule that counts "
        f"optimizer steps ends {len(rates)} times too early so: call scheduler.step() after optimizer.step() only. One "
        "that counts micro-batches is right as it is"
    ]


def changed_before(rates: Sequence[Rates]) -> list[int]:
    """Micro-steps, from 1, that found other rates than the one before."""
    if len({len(each) for each in rates}) > 1:
        return []  # a group was added
    return [k for k in range(2, len(rates) + 1) if rates[k - 1] != rates[k - 2]]
