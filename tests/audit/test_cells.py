"""The choice of cells: every pair of circumstances that can come up does, and what is suspected is always tried.

Run: pytest -n 0 tests/audit/test_cells.py. Not covered: what comes out (test_cells_tried.py).
"""

from __future__ import annotations

from dataclasses import astuple
from itertools import combinations

from dsaccum.audit.cells import (
    CLIPPINGS,
    STAGES,
    Abilities,
    Cell,
    Circumstances,
    every_cell,
    pairwise_cells,
    suspected_cells,
    why_untested,
)
from dsaccum.audit.ways import WAYS
from dsaccum.power.settings import cover_pairs

CPU, GPU = Abilities(fp16=False, fused_adam=False), Abilities(fp16=True, fused_adam=True)


def pairs(cells: list[Cell]) -> set[object]:
    return {pair for cell in cells for pair in combinations(enumerate((cell.way, *astuple(cell.circumstances))), 2)}


def test_every_pair_comes_up_in_few_cells() -> None:
    for abilities in (CPU, GPU):
        chosen, every = pairwise_cells(abilities), every_cell(abilities)
        assert pairs(chosen) == pairs(every)
        assert len(chosen) == len(set(chosen)) < len(every) / 15
        assert set(suspected_cells(abilities)) <= set(chosen) <= set(every)
        # A way and a stage make a pair, and a cell holds one of them.
        assert len(chosen) >= len(WAYS) * len(STAGES)


def test_what_a_machine_cannot_run_is_not_tried_there_and_is_elsewhere() -> None:
    on_cpu = pairwise_cells(CPU)
    assert all(why_untested(cell.circumstances, CPU) is None for cell in on_cpu)
    assert not {"fp16", "FusedAdam"} & {value for cell in on_cpu for value in astuple(cell.circumstances)}
    assert {"fp16", "FusedAdam"} <= {value for cell in pairwise_cells(GPU) for value in astuple(cell.circumstances)}
    old = Abilities(fp16=False, fused_adam=False, autocast=False)
    assert {cell.circumstances.precision for cell in pairwise_cells(old)} == {"fp32", "bf16"}


def test_ways_that_need_a_window_are_tried_with_one() -> None:
    assert all(cell.circumstances.accumulation_steps > 1 for cell in every_cell(CPU) if cell.way == "no-sync")
    assert any(cell.circumstances.accumulation_steps == 1 for cell in every_cell(CPU) if cell.way == "own-loss")


def test_known_faults_are_looked_for_at_every_stage() -> None:
    chosen = suspected_cells(CPU)
    for way in ("scale-wrt-gas-false", "loss-backward", "short-window", "two-backwards", "no-sync", "unused"):
        assert {cell.circumstances.zero_stage for cell in chosen if cell.way == way} == set(STAGES)
        assert all(cell.circumstances.accumulation_steps == 4 for cell in chosen if cell.way == way)
    for stage in STAGES:
        assert Cell("own-loss", Circumstances(stage, clipping="absent")) in chosen
    assert Cell("own-loss", Circumstances(0, precision="bf16")) in chosen


def test_the_cover_starts_from_what_is_given() -> None:
    choices = {number: (number % 3, number // 3 % 3, clipping) for number, clipping in enumerate(CLIPPINGS * 9)}
    alone = cover_pairs(choices)
    assert cover_pairs(choices, alone) == alone
    assert cover_pairs(choices, [26])[0] == 26
    assert cover_pairs({}) == []
