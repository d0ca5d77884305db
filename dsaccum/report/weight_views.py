"""The weights of the micro-batches, judged: what was due, what was found, and where the two differ too much."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsaccum.report.figures import NOT_MEASURED, numbered, scientific
from dsaccum.verification.records.record import Matrix, WeightsRecord


@dataclass(frozen=True)
class WeightView:
    """One matrix, what was due, and the places (row, rank) where the two differ by more than they may."""

    due: Matrix
    found: Matrix
    margin: float
    odd: frozenset[tuple[int, int]]

    @property
    def ranks(self) -> int:
        """W."""
        return len(self.due[0])

    @property
    def due_alike(self) -> bool:
        """Whether all ranks are due the same in each row, so that one column tells it."""
        return all(len(set(row)) == 1 for row in self.due)

    def odd_ranks(self, row: int) -> list[int]:
        """Of this row."""
        return [rank for rank in range(self.ranks) if (row, rank) in self.odd]

    def odd_rows(self) -> list[int]:
        """Those with any."""
        return sorted({row for row, _ in self.odd})


def weight_views(weights: WeightsRecord) -> list[tuple[str, WeightView]]:
    """Of one step: one without a label; or one for each group of ranks, where ranks got different weights."""
    if not weights.expected or not weights.expected[0]:
        return []
    groups: list[tuple[Matrix, list[int]]] = []
    for rank, matrix in enumerate(weights.by_rank or []):
        if matrix is None:
            continue
        members = next((ranks for first, ranks in groups if _alike(first, matrix, weights)), None)
        if members is None:
            groups.append((matrix, [rank]))
        else:
            members.append(rank)
    if len(groups) < 2:
        return [("", _view(weights, weights.recovered))] if weights.recovered else []
    return [(f"as {numbered('rank', ranks)} got it", _view(weights, matrix)) for matrix, ranks in groups]


def _view(weights: WeightsRecord, matrix: Matrix) -> WeightView:
    due, tolerance = weights.expected or [], weights.tolerance or 0.0
    odd = {
        (row, rank)
        for row, cells in enumerate(due)
        for rank, expected in enumerate(cells)
        if expected is not None and relative_error(matrix[row][rank], expected, due) > tolerance
    }
    return WeightView(due, matrix, _margin(due, tolerance), frozenset(odd))


def is_odd(views: list[tuple[str, WeightView]]) -> bool:
    """Whether any weight is wrong."""
    return any(view.odd for _, view in views)


def _alike(one: Matrix, other: Matrix, weights: WeightsRecord) -> bool:
    return close_to(one, other, _margin(weights.expected or [], weights.tolerance or 0.0))


def close_to(one: Matrix, other: Matrix, margin: float) -> bool:
    """Whether all cells are."""

    def close(a: float | None, b: float | None) -> bool:
        return a == b or (a is not None and b is not None and abs(a - b) <= margin)

    return all(close(*pair) for rows in zip(one, other, strict=True) for pair in zip(*rows, strict=True))


def _margin(due: Matrix, tolerance: float) -> float:
    """How far two weights may be apart that are both right."""
    return 2 * tolerance * _largest(due)


def relative_error(found: float | None, expected: float, due: Matrix) -> float:
    """|w / due - 1|; where nothing is due, against the largest weight of the window."""
    return 0.0 if found is None else abs(found - expected) / (expected or _largest(due) or 1.0)


def _largest(due: Matrix) -> float:
    return max((cell for row in due for cell in row if cell), default=0.0)


def decimals_for(due: Matrix) -> int:
    """Three significant digits of the smallest weight, four decimals at least."""
    positive = [cell for row in due for cell in row if cell]
    return max(4, 2 - math.floor(math.log10(min(positive)))) if positive else 4


def weight_text(weight: float | None, decimals: int) -> str:
    """``0.2500``."""
    if weight is None:
        return NOT_MEASURED
    return f"{round(weight, decimals) + 0.0:.{decimals}f}" if abs(weight) < 1e3 else scientific(weight)  # no -0.0
