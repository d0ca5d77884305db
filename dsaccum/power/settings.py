"""The settings in which faults are tried, and a choice of them in which every pair of circumstances comes up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations, product
from typing import Literal

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

    Circumstances are the fault, W, N, the ZeRO stage and the packing. Greedy: the cell with the most new pairs comes
    next, and of several the one whose setting is in use already, since each setting costs two runs of its own.

    Args:
        applicable: fault -> the settings that can show it.
    """
    pairs = {cell: frozenset(pairs_of(cell)) for cell in every_cell(applicable)}
    missing = set().union(*pairs.values())
    chosen: list[Cell] = []
    used: set[Setting] = set()

    def gain(cell: Cell) -> tuple[int, bool]:
        return len(pairs[cell] & missing), cell.setting in used

    while missing:
        best = max(pairs, key=gain)
        chosen.append(best)
        used.add(best.setting)
        missing.difference_update(pairs[best])
    return sorted(chosen, key=lambda cell: SETTINGS.index(cell.setting))


def pairs_of(cell: Cell) -> Iterator[tuple[tuple[int, object], tuple[int, object]]]:
    """Pairs of (which circumstance, its value)."""
    yield from combinations(enumerate((cell.fault, *astuple(cell.setting))), 2)
