"""What stays alive from one micro-step of a watched window to the next: gradients, and else nothing that grows.

Tensors alive at the beginning of micro-steps 2 to N are compared: from the second on the gradients are among them.
A loop may hold one micro-step's tensors at a time, the inputs of all, and of each a loss or two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsaccum.verification.measures.memory import ACTIVATIONS_KEPT, FLAT
from dsaccum.verification.records.record import ClaimState
from dsaccum.verification.records.watch import MicroStepMemory, WindowMemory
from dsaccum.watch.window import RankWindow, WatchedWindow

LOSSES = 64
"""Bytes that a loop may keep of each micro-step: a loss or two."""


@dataclass(frozen=True)
class Growth:
    """Of one rank, from the beginning of micro-step 2 to that of the last, in bytes.

    Attributes:
        grown: what more is alive.
        activations: of the largest micro-step.
        allowed: what may be.
        told: more would have been seen, had every micro-step's activations been kept.
    """

    rank: int
    steps: int
    grown: int
    activations: int
    allowed: float
    told: bool

    @property
    def kept(self) -> bool:
        """More than may be."""
        return self.grown > self.allowed


def growth_of(rank: RankWindow) -> Growth | None:
    """None where there are too few micro-steps to compare."""
    before, held, steps = rank.measured.before, rank.measured.held, len(rank.columns)
    if not len(before) == len(held) == steps >= 3:
        return None
    activations = [full - empty for full, empty in zip(held, before, strict=True)]
    largest, compared = max(activations), steps - 2
    # What it holds of one micro-step is as large as of the next where they have the same shape.
    one = FLAT * largest if len(set(rank.shapes)) == 1 else largest
    allowed = one + sum(rank.input_bytes[1:-1]) + LOSSES * compared
    return Growth(rank.rank, compared, before[-1] - before[1], largest, allowed, sum(activations[1:-1]) > allowed)


def judge_memory(window: WatchedWindow) -> tuple[ClaimState, str | None]:
    """The claim's state, and the reason for it."""
    reasons = [rank.measured.reason or rank.measured.memory_reason for rank in window.ranks]
    if reason := next(filter(None, reasons), None):
        return "untested", f"not measured: {reason}"
    for growth in map(growth_of, window.ranks):
        if growth is None:
            return "untested", "it takes three micro-steps, each of a forward before its backward, to see growth"
        if growth.kept:
            return "fail", (
                f"rank {growth.rank}: {growth.grown / growth.steps:,.0f} bytes more are alive after each micro-step, "
                f"{growth.grown / growth.steps / max(growth.activations, 1):.2f} of a micro-batch's activations"
            )
        if not growth.told:
            return "untested", "micro-batches differ too much in size to see growth in so few"
    return "pass", None


def memory_evidence(window: WatchedWindow) -> dict[str, Any] | None:
    """Of the cause ``activations-kept``."""
    growth = next((each for each in map(growth_of, window.ranks) if each is not None and each.kept), None)
    if growth is None:
        return None
    return {
        "id": ACTIVATIONS_KEPT,
        "rank": growth.rank,
        "bytes_per_micro_step": growth.grown // growth.steps,
        "activation_bytes": growth.activations,
    }


def memory_record(window: WatchedWindow) -> WindowMemory:
    """Rank 0's figures."""
    first = window.ranks[0]
    reason = first.measured.reason or first.measured.memory_reason
    growth = growth_of(first) if reason is None else None
    return WindowMemory(
        per_micro_step=[
            MicroStepMemory(micro_step=k, before_bytes=before, activation_bytes=held - before)
            for k, (before, held) in enumerate(zip(first.measured.before, first.measured.held, strict=False), start=1)
        ],
        growth_bytes=growth.grown if growth else None,
        allowed_bytes=int(growth.allowed) if growth else None,
        reason=reason,
    )
