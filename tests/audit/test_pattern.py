"""Where a cause shows is said in the fewest conditions, and never so that a right cell would be among them.

Run: pytest -n 0 tests/audit/test_pattern.py. Patterns speak of the cells that were tried, and of no others.
"""

from __future__ import annotations

from dsaccum.audit.pattern import patterns
from dsaccum.audit.record import CellRecord
from tests.audit.records import cell


def found(cells: list[CellRecord], cause: str) -> list[tuple[dict[str, tuple[object, ...]], int]]:
    return [(each.conditions, each.cells) for each in patterns(cells, lambda cell: cause in cell.causes)]


def test_one_way_at_one_stage() -> None:
    cells = [cell("flag", "wrong", 0, "twice"), cell("flag", "right", 1), cell("plain", "right", 0)]
    assert found(cells, "twice") == [({"way": ("flag",), "zero_stage": (0,)}, 1)]


def test_a_circumstance_beside_every_way() -> None:
    absent = [cell(way, "wrong", stage, "clip", clipping="absent") for way in ("a", "b") for stage in range(4)]
    cells = absent + [cell(way, "right", stage) for way in ("a", "b") for stage in range(4)]
    assert found(cells, "clip") == [({"clipping": ("absent",)}, 8)]


def test_stages_are_merged() -> None:
    cells = [cell("two", "wrong", stage, "lost") for stage in (1, 2)] + [
        cell("two", "right", stage) for stage in (0, 3)
    ]
    assert found([*cells, cell("plain", "right", 1), cell("plain", "right", 2)], "lost") == [
        ({"way": ("two",), "zero_stage": (1, 2)}, 2)
    ]


def test_what_cannot_show_it_speaks_for_nothing() -> None:
    hidden = [cell("a", "wrong", 1, "boundary-shifted"), cell("a", "refused", 2), cell("a", "untested", 3)]
    cells = [cell("a", "wrong", 0, "x"), *hidden, cell("b", "right", 0)]
    assert found(cells, "x") == [({"way": ("a",)}, 1)]
    assert found([*cells, cell("a", "wrong", 1, "y")], "x") == [({"way": ("a",), "zero_stage": (0,)}, 1)]


def test_cells_that_nothing_singles_out_are_spelt_out() -> None:
    """The same circumstances once right and once wrong: no condition is sound, and none is made up."""
    cells = [cell("a", "wrong", 0, "x"), cell("a", "right", 0)]
    [(conditions, number)] = found(cells, "x")
    assert (len(conditions), number) == (6, 1)
    assert found(cells, "another") == []
