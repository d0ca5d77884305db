"""The choice of cells: every pair of circumstances that can come up does, in few cells, and N is never W."""

from __future__ import annotations

from collections import Counter

from dsaccum.power.settings import SETTINGS, Cell, every_cell, pairs_of, pairwise_cells

FAULTS = [f"fault-{number}" for number in range(30)]


def pairs(cells: list[Cell]) -> set[object]:
    return {pair for cell in cells for pair in pairs_of(cell)}


def test_settings_are_all_combinations_but_those_with_as_many_ranks_as_micro_steps() -> None:
    assert len(SETTINGS) == len(set(SETTINGS)) == 32
    assert all(setting.ranks != setting.accumulation_steps for setting in SETTINGS)


def test_every_pair_comes_up_in_few_cells() -> None:
    applicable = dict.fromkeys(FAULTS, SETTINGS)
    chosen = pairwise_cells(applicable)
    assert pairs(chosen) == pairs(every_cell(applicable))
    # A fault and a stage make 120 pairs, and a cell holds one of them: fewer than 120 cells cannot do.
    assert 120 <= len(chosen) <= 135
    assert len({cell.setting for cell in chosen}) <= 16, "settings that are in use come first"
    assert max(Counter(cell.fault for cell in chosen).values()) <= 6


def test_what_cannot_show_itself_is_not_tried() -> None:
    ragged = [setting for setting in SETTINGS if setting.packing == "ragged"]
    alone = [setting for setting in SETTINGS if setting.zero_stage == 3 and setting.ranks == 1][:1]
    applicable = {"needs-ragged": ragged, "one-place": alone, "anywhere": SETTINGS}
    chosen = pairwise_cells(applicable)
    assert all(cell.setting in applicable[cell.fault] for cell in chosen)
    assert pairs(chosen) == pairs(every_cell(applicable))
    assert Cell("one-place", alone[0]) in chosen
    assert pairwise_cells({}) == []


def test_cells_come_setting_by_setting() -> None:
    order = [SETTINGS.index(cell.setting) for cell in pairwise_cells(dict.fromkeys(FAULTS, SETTINGS))]
    assert order == sorted(order)
