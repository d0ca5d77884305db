"""The weights of the micro-batches as a matrix: micro-steps in rows, ranks in columns, what was due beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from dsaccum.report.figures import NOT_MEASURED, against, middle_left_out, numbered, scientific
from dsaccum.report.layout import ASIDE, RIGHT, WRONG, columns, heading, labelled
from dsaccum.verification.records.record import Matrix, StepRecord, WeightsRecord

MOST_ROWS, MOST_MATRICES = 12, 4
_GAP = "..."


@dataclass(frozen=True)
class _View:
    """One matrix, what was due, and the places (row, rank) where the two differ by more than they may."""

    due: Matrix
    found: Matrix
    margin: float
    odd: frozenset[tuple[int, int]]

    @property
    def ranks(self) -> int:
        return len(self.due[0])

    @property
    def due_alike(self) -> bool:
        """Whether all ranks are due the same in each row, so that one column tells it."""
        return all(len(set(row)) == 1 for row in self.due)

    def odd_ranks(self, row: int) -> list[int]:
        return [rank for rank in range(self.ranks) if (row, rank) in self.odd]

    def odd_rows(self) -> list[int]:
        return sorted({row for row, _ in self.odd})


def weight_lines(steps: Sequence[StepRecord], *, width: int) -> list[Text]:
    """The matrix of all steps where they are alike, else of the first odd step; of each rank where ranks differ."""
    views = {step.step: _views(step.micro_batch_weights) for step in steps}
    views = {step: found for step, found in views.items() if found}
    title = "weights of the micro-batches"
    if not views:
        reasons = sorted({step.micro_batch_weights.reason or "not measured" for step in steps})
        return [Text(), *labelled("weights", "not told: " + "; ".join(reasons), width=width)]
    chosen = next((step for step, found in views.items() if _is_odd(found)), next(iter(views)))
    aside = _which_steps(chosen, views) + _error(steps, chosen)
    lines = heading(title, aside, width=width)
    for label, view in views[chosen][:MOST_MATRICES]:
        lines += ([Text(label)] if label else []) + _matrix(view)
    left_out = len(views[chosen]) - MOST_MATRICES
    return lines + ([Text(f"{left_out} more in the record", ASIDE)] if left_out > 0 else [])


def _views(weights: WeightsRecord) -> list[tuple[str, _View]]:
    """One without a label; or one for each group of ranks, where ranks got different weights."""
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


def _view(weights: WeightsRecord, matrix: Matrix) -> _View:
    due, tolerance = weights.expected or [], weights.tolerance or 0.0
    odd = {
        (row, rank)
        for row, cells in enumerate(due)
        for rank, expected in enumerate(cells)
        if expected is not None and _relative_error(matrix[row][rank], expected, due) > tolerance
    }
    return _View(due, matrix, _margin(due, tolerance), frozenset(odd))


def _is_odd(views: list[tuple[str, _View]]) -> bool:
    return any(view.odd for _, view in views)


def _which_steps(chosen: int, views: dict[int, list[tuple[str, _View]]]) -> str:
    alike = [step for step in views if _show_the_same(views[step], views[chosen])]
    others = [step for step in views if step not in alike]
    odd = [step for step in others if _is_odd(views[step])]
    right = [step for step in others if step not in odd]
    text = numbered("step", alike)
    text += f"; {numbered('step', odd)} wrong in other ways" if odd else ""
    return text + (f"; {numbered('step', right)} as due" if right else "")


def _show_the_same(these: list[tuple[str, _View]], those: list[tuple[str, _View]]) -> bool:
    """Whether one of them can stand for both."""
    return len(these) == len(those) and all(
        label == other_label
        and view.odd == other.odd
        and view.due == other.due
        and _close(view.found, other.found, view.margin)
        for (label, view), (other_label, other) in zip(these, those, strict=True)
    )


def _alike(one: Matrix, other: Matrix, weights: WeightsRecord) -> bool:
    return _close(one, other, _margin(weights.expected or [], weights.tolerance or 0.0))


def _close(one: Matrix, other: Matrix, margin: float) -> bool:
    def close(a: float | None, b: float | None) -> bool:
        return a == b or (a is not None and b is not None and abs(a - b) <= margin)

    return all(close(*pair) for rows in zip(one, other, strict=True) for pair in zip(*rows, strict=True))


def _margin(due: Matrix, tolerance: float) -> float:
    """How far two weights may be apart that are both right."""
    return 2 * tolerance * _largest(due)


def _relative_error(found: float | None, expected: float, due: Matrix) -> float:
    """|w / due - 1|; where nothing is due, against the largest weight of the window."""
    return 0.0 if found is None else abs(found - expected) / (expected or _largest(due) or 1.0)


def _largest(due: Matrix) -> float:
    return max((cell for row in due for cell in row if cell), default=0.0)


def _error(steps: Sequence[StepRecord], chosen: int) -> str:
    [weights] = [step.micro_batch_weights for step in steps if step.step == chosen]
    return f"; off by {against(weights.max_error, weights.tolerance).strip()}" if weights.max_error is not None else ""


def _matrix(view: _View) -> list[Text]:
    rows = middle_left_out(len(view.due), MOST_ROWS, view.odd_rows())
    ranks = middle_left_out(view.ranks, _most_ranks(view), sorted({rank for _, rank in view.odd}))
    decimals = _decimals(view.due)
    table: list[list[Text | str]] = [_head(view, ranks)]
    for place, row in enumerate(rows):
        if row is None:  # never the first nor the last: both ends are shown
            hidden = range((rows[place - 1] or 0) + 1, rows[place + 1] or 0)
            table.append(_gap_row(view, hidden, len(table[0])))
        else:
            table.append(_row(view, row, ranks, decimals))
    return columns(table, left=frozenset({0, len(table[0]) - 1}))


def _head(view: _View, ranks: list[int | None]) -> list[Text | str]:
    names = [_GAP if rank is None else f"rank {rank}" for rank in ranks]
    due = ["due"] if view.due_alike else [name if name == _GAP else f"due, {name}" for name in names]
    return ["", *due, *(["recovered"] if view.ranks == 1 else names), ""]


def _row(view: _View, row: int, ranks: list[int | None], decimals: int) -> list[Text | str]:
    due_on = [0] if view.due_alike else ranks
    due: list[Text | str] = [_GAP if rank is None else _cell(view.due[row][rank], decimals) for rank in due_on]
    found: list[Text | str] = [
        _GAP if rank is None
        else Text(_cell(view.found[row][rank], decimals), WRONG if (row, rank) in view.odd else RIGHT)
        for rank in ranks
    ]  # fmt: skip
    return [f"micro-step {row + 1}", *due, *found, Text(_mark(view, row, decimals), WRONG)]


def _mark(view: _View, row: int, decimals: int) -> str:
    """What is wrong in this row; empty if nothing is."""
    odd = view.odd_ranks(row)
    if not odd:
        return ""
    if len(odd) < view.ranks:
        return f"<-- {numbered('rank', odd)}"
    due = {_cell(view.due[row][rank], decimals) for rank in odd}
    found = {_cell(view.found[row][rank], decimals) for rank in odd}
    if due == found:  # the digits shown are the same
        errors = [_relative_error(view.found[row][rank], view.due[row][rank] or 0.0, view.due) for rank in odd]
        return f"<-- off by {scientific(max(errors))}"
    return f"<-- due {due.pop()}" if len(due) == 1 else "<-- not as due"


def _gap_row(view: _View, hidden: range, length: int) -> list[Text | str]:
    wrong = len({row for row in view.odd_rows() if row in hidden})
    note = f"({len(hidden)} more, {wrong} of them wrong)" if wrong else f"({len(hidden)} more as due)"
    return [_GAP, *([""] * (length - 2)), Text(note, WRONG if wrong else ASIDE)]


def _most_ranks(view: _View) -> int:
    """As many columns as fit 80 characters."""
    if view.due_alike:
        return 4 if view.ranks <= 4 else 3
    return 2 if view.ranks <= 2 else 1


def _decimals(due: Matrix) -> int:
    """Three significant digits of the smallest weight, four decimals at least."""
    positive = [cell for row in due for cell in row if cell]
    return max(4, 2 - math.floor(math.log10(min(positive)))) if positive else 4


def _cell(weight: float | None, decimals: int) -> str:
    if weight is None:
        return NOT_MEASURED
    return f"{round(weight, decimals) + 0.0:.{decimals}f}" if abs(weight) < 1e3 else scientific(weight)  # no -0.0
