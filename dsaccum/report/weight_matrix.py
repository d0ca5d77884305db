"""The weights of the micro-batches as a matrix: micro-steps in rows, ranks in columns, what was due beside it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from dsaccum.report.figures import error_and_bound, middle_left_out, numbered, scientific
from dsaccum.report.layout import ASIDE, RIGHT, WRONG, columns, heading, labelled
from dsaccum.report.weight_views import (
    WeightView,
    close_to,
    decimals_for,
    is_odd,
    relative_error,
    weight_text,
    weight_views,
)
from dsaccum.verification.records.record import StepRecord

MOST_ROWS, MOST_MATRICES = 12, 4
_GAP = "..."


def weight_lines(steps: Sequence[StepRecord], *, width: int, remark: str = "") -> list[Text]:
    """The matrix of all steps where they are alike, else of the first odd step; of each rank where ranks differ.

    Args:
        steps: whose weights they are.
        width: of a line.
        remark: on what the weights are relative to.
    """
    views = {step.step: weight_views(step.micro_batch_weights) for step in steps}
    views = {step: found for step, found in views.items() if found}
    title = "weights of the micro-batches"
    if not views:
        reasons = sorted({step.micro_batch_weights.reason or "not measured" for step in steps})
        return [Text(), *labelled("weights", "not told: " + "; ".join(reasons), width=width)]
    chosen = next((step for step, found in views.items() if is_odd(found)), next(iter(views)))
    aside = _which_steps(chosen, views) + _error(steps, chosen) + (f"; {remark}" if remark else "")
    lines = heading(title, aside, width=width)
    for label, view in views[chosen][:MOST_MATRICES]:
        lines += ([Text(label)] if label else []) + _matrix(view)
    left_out = len(views[chosen]) - MOST_MATRICES
    return lines + ([Text(f"{left_out} more in the record", ASIDE)] if left_out > 0 else [])


def _which_steps(chosen: int, views: dict[int, list[tuple[str, WeightView]]]) -> str:
    alike = [step for step in views if _show_the_same(views[step], views[chosen])]
    others = [step for step in views if step not in alike]
    odd = [step for step in others if is_odd(views[step])]
    right = [step for step in others if step not in odd]
    text = numbered("step", alike)
    text += f"; {numbered('step', odd)} wrong in other ways" if odd else ""
    return text + (f"; {numbered('step', right)} as due" if right else "")


def _show_the_same(these: list[tuple[str, WeightView]], those: list[tuple[str, WeightView]]) -> bool:
    """Whether one of them can stand for both."""
    return len(these) == len(those) and all(
        label == other_label
        and view.odd == other.odd
        and view.due == other.due
        and close_to(view.found, other.found, view.margin)
        for (label, view), (other_label, other) in zip(these, those, strict=True)
    )


def _error(steps: Sequence[StepRecord], chosen: int) -> str:
    [weights] = [step.micro_batch_weights for step in steps if step.step == chosen]
    if weights.max_error is None:
        return ""
    return f"; off by {error_and_bound(weights.max_error, weights.tolerance)}"


def _matrix(view: WeightView) -> list[Text]:
    rows = middle_left_out(len(view.due), MOST_ROWS, view.odd_rows())
    ranks = middle_left_out(view.ranks, _most_ranks(view), sorted({rank for _, rank in view.odd}))
    decimals = decimals_for(view.due)
    table: list[list[Text | str]] = [_head(view, ranks)]
    for place, row in enumerate(rows):
        if row is None:  # never the first nor the last: both ends are shown
            hidden = range((rows[place - 1] or 0) + 1, rows[place + 1] or 0)
            table.append(_gap_row(view, hidden, len(table[0])))
        else:
            table.append(_row(view, row, ranks, decimals))
    return columns(table, left=frozenset({0, len(table[0]) - 1}))


def _head(view: WeightView, ranks: list[int | None]) -> list[Text | str]:
    names = [_GAP if rank is None else f"rank {rank}" for rank in ranks]
    due = ["due"] if view.due_alike else [name if name == _GAP else f"due, {name}" for name in names]
    return ["", *due, *(["recovered"] if view.ranks == 1 else names), ""]


def _row(view: WeightView, row: int, ranks: list[int | None], decimals: int) -> list[Text | str]:
    due_on = [0] if view.due_alike else ranks
    due: list[Text | str] = [_GAP if rank is None else weight_text(view.due[row][rank], decimals) for rank in due_on]
    found: list[Text | str] = [
        _GAP if rank is None
        else Text(weight_text(view.found[row][rank], decimals), WRONG if (row, rank) in view.odd else RIGHT)
        for rank in ranks
    ]  # fmt: skip
    return [f"micro-step {row + 1}", *due, *found, Text(_mark(view, row, decimals), WRONG)]


def _mark(view: WeightView, row: int, decimals: int) -> str:
    """What is wrong in this row; empty if nothing is."""
    odd = view.odd_ranks(row)
    if not odd:
        return ""
    if len(odd) < view.ranks:
        return f"<-- {numbered('rank', odd)}"
    due = {weight_text(view.due[row][rank], decimals) for rank in odd}
    found = {weight_text(view.found[row][rank], decimals) for rank in odd}
    if due == found:  # the digits shown are the same
        errors = [relative_error(view.found[row][rank], view.due[row][rank] or 0.0, view.due) for rank in odd]
        return f"<-- off by {scientific(max(errors))}"
    if len(due) == 1:
        return f"<-- due {due.pop()}"
    return f"<-- {_times_due(view, row, odd)} x due"


def _times_due(view: WeightView, row: int, odd: list[int]) -> str:
    """``1.02``, or the smallest and the largest where ranks differ."""
    weights = [(view.found[row][rank], view.due[row][rank]) for rank in odd]
    factors = sorted(found / due for found, due in weights if found is not None and due)
    ends = list(dict.fromkeys(f"{factor:.3g}" for factor in (factors[:1] + factors[-1:])))
    return " to ".join(ends) or "not"


def _gap_row(view: WeightView, hidden: range, length: int) -> list[Text | str]:
    wrong = len({row for row in view.odd_rows() if row in hidden})
    note = f"({len(hidden)} more, {wrong} of them wrong)" if wrong else f"({len(hidden)} more as due)"
    return [_GAP, *([""] * (length - 2)), Text(note, WRONG if wrong else ASIDE)]


def _most_ranks(view: WeightView) -> int:
    """As many columns as fit 80 characters."""
    if view.due_alike:
        return 4 if view.ranks <= 4 else 3
    return 2 if view.ranks <= 2 else 1
