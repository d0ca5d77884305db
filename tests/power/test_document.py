"""docs/faults.md holds the matrix of the record beside it, and the record is good enough to be shown.

Run: pytest -n 0 tests/power/test_document.py. Not covered: that a run today gives the same (the record says with which
versions it was made).
"""

from __future__ import annotations

import re

import pytest

from dsaccum.cli.outcome import ExitCode
from dsaccum.power.record import FaultsRecord
from dsaccum.report.fault_matrix import LETTERS, ONLY_ON_A_GPU
from dsaccum.verification.subject.faults import FAULTS
from tests.docs.markdown import prose, section, tables
from tests.power.document import PAGE, RECORDS, block, written

RECORD = RECORDS / "faults-0.19.8.json"


@pytest.fixture(scope="module")
def record() -> FaultsRecord:
    return FaultsRecord.read(RECORD)


def test_the_matrix_is_made_from_its_record(record: FaultsRecord) -> None:
    assert written(RECORD) == block(record)


def test_a_matrix_of_another_record_would_be_noticed(record: FaultsRecord) -> None:
    """Control."""
    first, *others = record.cells
    missed = record.model_copy(update={"cells": [first.model_copy(update={"outcome": "missed"}), *others]})
    assert written(RECORD) != block(missed)


def test_all_are_caught_and_none_is_called_by_a_wrong_name(record: FaultsRecord) -> None:
    summary = record.summary
    assert summary.caught == summary.cells == len(record.cells) >= 120
    assert summary.wrongly_named == summary.false_alarms == 0
    assert summary.rightly_named >= 0.95


def test_the_usual_check_saw_fewer(record: FaultsRecord) -> None:
    """Adam and clipping hide a wrong factor from it, so that all faults of scale are missed."""
    assert record.summary.usual_check_caught < record.summary.cells
    for fault in ("loss-not-scaled", "loss-scaled-twice", "ranks-summed", "ranks-averaged-twice"):
        assert {cell.usual_check for cell in record.cells if cell.fault == fault} == {"missed"}
    told = re.search(r"saw (\d+) of the (\d+) cells", prose(PAGE))
    assert told
    assert [int(number) for number in told.groups()] == [record.summary.usual_check_caught, record.summary.cells]


def test_every_fault_that_a_cpu_can_show_was_tried(record: FaultsRecord) -> None:
    tried = {cell.fault for cell in record.cells}
    assert tried == FAULTS.keys() - set(ONLY_ON_A_GPU)
    assert set(ONLY_ON_A_GPU) <= {each.fault for each in record.not_applicable}


def test_the_record_is_of_the_whole_matrix_and_names_no_place_on_a_machine(record: FaultsRecord) -> None:
    assert record.cover == "pairwise"
    assert record.versions["deepspeed"] == "0.19.8"
    assert record.command == ["dsaccum", "faults", "--run", "--json", f"docs/records/{RECORD.name}"]
    assert not re.search(r"""["' (](?:/|[A-Z]:\\)\w+/""", RECORD.read_text(encoding="utf-8"))


def test_letters_and_exit_codes_are_those_of_the_code() -> None:
    told = set(re.findall(r"`([A-Za-z])` ", section(PAGE, "The matrix")))
    assert {letter for letter, _ in LETTERS.values()} == told
    [table] = tables(section(PAGE, "Exit codes"))
    assert [int(number) for number, _ in table] == [code.value for code in ExitCode]
