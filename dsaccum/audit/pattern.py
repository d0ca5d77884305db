"""Where something shows: the fewest conditions that single its cells out of all that were tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from dsaccum.audit.record import CellRecord

MOST_CONDITIONS: Final = 4
Values = Mapping[str, object]
_HIDING: Final = frozenset({"boundary-shifted", "step-inside-window"})
"""With these, no other cause can be seen in a cell."""


@dataclass(frozen=True)
class Pattern:
    """Conditions that all hold: of each circumstance that matters, the values at which it shows.

    Attributes:
        conditions: circumstance -> values.
        cells: how many of the cells that show it fulfil them.
    """

    conditions: dict[str, tuple[object, ...]]
    cells: int


def patterns(cells: Sequence[CellRecord], shows: Callable[[CellRecord], bool]) -> list[Pattern]:
    """Patterns that together hold all cells which show it and no other, those with the most cells first.

    Cells that are refused, untested, or where the optimizer did not step when it should, speak neither for nor against.
    Greedy: the conditions that hold the most cells come next, of several the fewest, of those the ones on the way.

    Args:
        cells: all that were tried.
        shows: whether it shows in a cell.
    """
    showing = [_values(cell) for cell in cells if shows(cell)]
    against = [_values(cell) for cell in cells if _speaks(cell) and not shows(cell)]
    found: list[dict[str, object]] = []
    left = list(showing)
    while left:
        sound = [each for each in _candidates(left) if not any(_holds(each, other) for other in against)]
        best = max(sound, key=lambda each: (_count(each, left), -len(each), "way" in each), default=dict(left[0]))
        found.append(best)
        left = [each for each in left if not _holds(best, each)]
    counted = [Pattern(conditions, _count_any(conditions, showing)) for conditions in _merged(found)]
    return sorted(counted, key=lambda each: -each.cells)


def _speaks(cell: CellRecord) -> bool:
    return cell.outcome in ("right", "costly", "wrong") and not _HIDING & set(cell.causes)


def _values(cell: CellRecord) -> dict[str, object]:
    return {"way": cell.way, **cell.circumstances.model_dump()}


def _candidates(showing: Sequence[Values]) -> list[dict[str, object]]:
    unique: dict[tuple[tuple[str, object], ...], None] = {}
    for values in showing:
        for number in range(1, MOST_CONDITIONS + 1):
            unique.update(dict.fromkeys(combinations(values.items(), number)))
    return [dict(each) for each in unique]


def _holds(conditions: Values, values: Values) -> bool:
    return all(values[name] == value for name, value in conditions.items())


def _count(conditions: Values, cells: Sequence[Values]) -> int:
    return sum(_holds(conditions, each) for each in cells)


def _count_any(conditions: Mapping[str, tuple[object, ...]], cells: Sequence[Values]) -> int:
    return sum(all(each[name] in values for name, values in conditions.items()) for each in cells)


def _merged(found: Sequence[Values]) -> list[dict[str, tuple[object, ...]]]:
    """Those that differ in one circumstance alone as one: ``ZeRO 1`` and ``ZeRO 2`` are ``ZeRO 1, 2``."""
    sets: list[dict[str, tuple[object, ...]]] = [{name: (value,) for name, value in each.items()} for each in found]
    while (pair := next(_alike(sets), None)) is not None:
        first, second, name = pair
        sets[first] = {**sets[first], name: (*sets[first][name], *sets[second][name])}
        del sets[second]
    return sets


def _alike(sets: Sequence[Mapping[str, tuple[object, ...]]]) -> Iterator[tuple[int, int, str]]:
    for first, second in combinations(range(len(sets)), 2):
        one, other = sets[first], sets[second]
        if one.keys() == other.keys():
            differing = [name for name in one if one[name] != other[name]]
            if len(differing) == 1:
                yield first, second, differing[0]
