"""Windows made of figures, for what is said of them: no script runs, and no model.

Each micro-batch's gradient is drawn; what its tokens weigh and what the ranks made of the sum is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from dsaccum.report.layout import as_plain_text
from dsaccum.report.watch import watch_lines
from dsaccum.verification.records.watch import WatchRecord, WindowRecord
from dsaccum.watch.judge import Judged
from dsaccum.watch.past_outputs import judge
from dsaccum.watch.record import describe_subject, describe_window
from dsaccum.watch.tokens import TokenReading
from dsaccum.watch.window import RankWindow, RunFacts, Vectors, WatchedWindow

FACTS = RunFacts("bare", "", "Net", 96, 96, None, "fp32", "fp32", "fp32", None, None, 0.0, 3)
SHAPES = {"first.weight": (8, 8), "last.weight": (4, 8)}
TARGETS = 10


def made_window(
    arriving: Sequence[float],
    passing: Sequence[Sequence[Sequence[float]]] | None = None,
    *,
    ranks: int = 1,
    same_inputs: bool = False,
    facts: dict[str, Any] | None = None,
    rank: dict[str, Any] | None = None,
) -> WatchedWindow:
    """One window.

    Args:
        arriving: what the script made of each micro-step's loss, a mean over its tokens.
        passing: what became of it for each rank that got it, [rank][micro-step][rank it came from]; the mean over
            ranks if left out.
        ranks: how many.
        same_inputs: all ranks were fed the same.
        facts: what is otherwise than in ``FACTS``.
        rank: further fields of each rank's window.
    """
    steps = len(arriving)
    passing = passing or [[[1 / ranks] * ranks] * steps] * ranks
    torch.manual_seed(0)
    columns = [[_drawn() for _ in range(ranks)] for _ in range(steps)]
    if same_inputs:
        columns = [[row[0]] * ranks for row in columns]
    scaled = [[_times(columns[k][r], arriving[k]) for r in range(ranks)] for k in range(steps)]
    windows = [
        RankWindow(
            r,
            columns=[row[r] for row in scaled],
            truths=[row[r] for row in scaled],
            tokens=[
                TokenReading([each / TARGETS] * TARGETS, due=TARGETS, rows=2, all_rows=2, positions=2 * TARGETS,
                             before_shift=TARGETS + 2, tolerance=1e-6)
                for each in arriving
            ],
            seeds=[None] * steps,
            engine=[1.0] * steps,
            gradient=_sum([_times(scaled[k][c], passing[r][k][c]) for k in range(steps) for c in range(ranks)]),
            inputs=[(k,) if same_inputs else (k * ranks + r,) for k in range(steps)],
            row_prints=[()] * steps,
            rows=[2] * steps,
            shapes=[((2, 12),)] * steps,
            input_bytes=[192] * steps,
            calls=list(range(steps)),
        )
        for r in range(ranks)
    ]  # fmt: skip
    return WatchedWindow(replace(FACTS, **(facts or {})), [replace(each, **(rank or {})) for each in windows])


def described_window(window: WatchedWindow) -> WindowRecord:
    """As it stands in the record."""
    return describe_window(judge(window))


def printed(window: WatchedWindow, *, width: int = 300) -> str:
    """What people read."""
    judged: Judged = judge(window)
    engine = describe_subject(judged, [describe_window(judged)])
    return as_plain_text(watch_lines(WatchRecord(engines=[engine]), width=width))


def _drawn() -> Vectors:
    return {name: torch.randn(shape, dtype=torch.float64).flatten() for name, shape in SHAPES.items()}


def _times(vectors: Vectors, factor: float) -> Vectors:
    return {name: factor * tensor for name, tensor in vectors.items()}


def _sum(vectors: Sequence[Vectors]) -> Vectors:
    return {name: sum((each[name] for each in vectors), torch.zeros(()).double()) for name in SHAPES}
