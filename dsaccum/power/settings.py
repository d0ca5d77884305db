"""The settings in which faults are tried, and a choice of them in which every pair of circumstances comes up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations, product
from typing import Literal, TypeVar

Packing = Literal["packed", "ragged"]


@dataclass(frozen=True, order=True)
class Setting:
    """One way of running: never N = W, where different faults look alike.

    Attributes:
        ranks: W.
        accumulation_steps: N.
        zero_stage: 0 to 3.
        packing: rows of equal or of different numbers of targets.
    """

    ranks: int
    accumulation_steps: int
    zero_stage: int
    packing: Packing


PACKINGS: tuple[Packing, ...] = ("packed", "ragged")
SETTINGS: tuple[Setting, ...] = tuple(
    Setting(ranks, steps, stage, packing)
    for stage, ranks, steps, packing in product(range(4), (2, 1), (3, 4), PACKINGS)
)


@dataclass(frozen=True)
class Cell:
    """A fault in a setting."""

    fault: str
    setting: Setting


def every_cell(applicable: Mapping[str, Sequence[Setting]]) -> list[Cell]:
    """All of them, setting by setting."""
    cells = [Cell(fault, setting) for fault, settings in applicable.items() for setting in settings]
    return sorted(cells, key=lambda cell: SETTINGS.index(cell.setting))


def pairwise_cells(applicable: Mapping[str, Sequence[Setting]]) -> list[Cell]:
    """Few cells that hold every pair of circumstances which some applicable cell holds.

    Circumstances are the fault, W, N, the ZeRO stage and the packing. Of several cells with as many new pairs the one
    whose setting is in use already comes next, since each setting costs two runs of its own.

    Args:
        applicable: fault -> the settings that can show it.
    """
    cells = {cell: _circumstances(cell) for cell in every_cell(applicable)}
    chosen = cover_pairs(cells, prefer=lambda cell, before: any(cell.setting == each.setting for each in before))
    return sorted(chosen, key=lambda cell: SETTINGS.index(cell.setting))


Choice = TypeVar("Choice", bound=Hashable)


def cover_pairs(
    circumstances: Mapping[Choice, Sequence[object]],
    given: Sequence[Choice] = (),
    prefer: Callable[[Choice, Sequence[Choice]], bool] = lambda choice, before: False,
) -> list[Choice]:
    """Few choices that together hold every pair of circumstances which one of all choices holds.

    Greedy: the choice with the most new pairs comes next; the first of several.

    Args:
        circumstances: of each choice, in the same order for all.
        given: choices that are made already, and come first.
        prefer: of several choices with as many new pairs, which to take: (choice, those before it).
    """
    pairs = {choice: frozenset(_pairs(each)) for choice, each in circumstances.items()}
    chosen = list(dict.fromkeys(given))
    missing = set().union(*pairs.values()).difference(*(pairs[choice] for choice in chosen))
    while missing:
        gains = {choice: len(pairs[choice] & missing) for choice in pairs}
        most = max(gains.values())
        best = max((choice for choice in pairs if gains[choice] == most), key=lambda choice: prefer(choice, chosen))
        chosen.append(best)
        missing.difference_update(pairs[best])
    return chosen


def pairs_of(cell: Cell) -> Iterator[tuple[tuple[int, object], tuple[int, object]]]:
    """Pairs of (which circumstance, its value)."""
    return _pairs(_circumstances(cell))


def _circumstances(cell: Cell) -> tuple[object, ...]:
    return (cell.fault, *astuple(cell.setting))


def _pairs(circumstances: Sequence[object]) -> Iterator[tuple[tuple[int, object], tuple[int, object]]]:
    yield from combinations(enumerate(circumstances), 2)
