"""Where something shows: few conditions that single its cells out of all that were tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dsaccum.audit.record import CellRecord

Values = Mapping[str, object]
Conditions = dict[str, tuple[object, ...]]
_BY_SUSPICION: Final = ("zero_stage", "accumulation_steps", "optimizer", "precision", "clipping")
"""Of two conditions that explain as much, the first is kept."""
_HIDING: Final = frozenset({"boundary-shifted", "step-inside-window"})
"""With these, no other cause can be seen in a cell."""


@dataclass(frozen=True)
class Pattern:
    """Conditions that all hold: of each circumstance that matters, the values at which it shows.

    Attributes:
        conditions: circumstance -> values.
        cells: how many of the cells that show it fulfil them.
    """

    conditions: Conditions
    cells: int


def patterns(cells: Sequence[CellRecord], shows: Callable[[CellRecord], bool]) -> list[Pattern]:
    """Patterns that together hold all cells which show it and no other, those with the most cells first.

    Cells that are refused, untested, or where the optimizer did not step when it should, speak neither for nor against.
    Each pattern starts from one cell, takes in those that it can without taking in one that speaks against it, and
    drops the conditions that it does not need.

    Args:
        cells: all that were tried.
        shows: whether it shows in a cell.
    """
    showing = [_values(cell) for cell in cells if shows(cell)]
    against = [_values(cell) for cell in cells if _speaks(cell) and not shows(cell)]
    found: list[Conditions] = []
    left = list(showing)
    while left:
        conditions = _narrowest(_widened({name: (value,) for name, value in left[0].items()}, left, against), against)
        found.append(conditions)
        left = [each for each in left if not _holds(conditions, each)]
    counted = [Pattern(each, sum(_holds(each, cell) for cell in showing)) for each in found]
    return sorted(counted, key=lambda each: -each.cells)


def _speaks(cell: CellRecord) -> bool:
    return cell.outcome in ("right", "costly", "wrong") and not _HIDING & set(cell.causes)


def _values(cell: CellRecord) -> dict[str, object]:
    circumstances = cell.circumstances.model_dump()
    return {"way": cell.way, **{name: circumstances[name] for name in _BY_SUSPICION}}


def _holds(conditions: Conditions, values: Values) -> bool:
    return all(values[name] in allowed for name, allowed in conditions.items())


def _is_sound(conditions: Conditions, against: Sequence[Values]) -> bool:
    return not any(_holds(conditions, each) for each in against)


def _widened(conditions: Conditions, cells: Sequence[Values], against: Sequence[Values]) -> Conditions:
    """With the values of every cell that can be taken in."""
    for cell in cells:
        wider = {name: tuple(dict.fromkeys((*allowed, cell[name]))) for name, allowed in conditions.items()}
        if _is_sound(wider, against):
            conditions = wider
    return conditions


def _narrowest(conditions: Conditions, against: Sequence[Values]) -> Conditions:
    """Without the conditions that nothing needs; the least suspicious go first."""
    for name in reversed(list(conditions)):
        fewer = {other: allowed for other, allowed in conditions.items() if other != name}
        if fewer and _is_sound(fewer, against):
            conditions = fewer
    return conditions
