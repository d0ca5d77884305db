"""The matrix as it is printed, and what it comes down to."""

from __future__ import annotations

import json

from dsaccum.power.record import CleanRecord
from dsaccum.report.fault_matrix import fault_lines, matrix_lines
from dsaccum.report.layout import WIDTH, as_plain_text
from tests.power.records import cell, record, setting

MIXED = record(
    cell("loss-not-scaled", stage=0, usual_check="missed"),
    cell("loss-not-scaled", stage=0, usual_check="caught"),
    cell("loss-not-scaled", "ambiguous", stage=3, usual_check="caught"),
    cell("stale-gradients", "misnamed", stage=1),
    cell("stale-gradients", "missed", stage=2),
    cell("ranks-summed", "unnamed", stage=1, detail="update: off by 0.1"),
    elapsed_s=12.3,
)


def test_a_letter_for_each_cell_and_the_usual_check_beside_it() -> None:
    lines = as_plain_text(matrix_lines(MIXED)).splitlines()
    assert lines[0].split() == ["fault", "ZeRO", "0", "ZeRO", "1", "ZeRO", "2", "ZeRO", "3", "usual", "check"]
    assert lines[1].split() == ["loss-not-scaled", "NN", "-", "-", "a", "2", "of", "3"]
    assert lines[2].split() == ["stale-gradients", "-", "X", "M", "-", "0", "of", "2"]
    assert all(len(line) <= WIDTH for line in lines)


def test_what_was_not_simply_named_is_spelt_out() -> None:
    text = " ".join(as_plain_text(matrix_lines(MIXED)).split())
    assert "stale-gradients (W = 2, N = 3, ZeRO 1, packed rows): misnamed, called other" in text
    assert "ranks-summed (W = 2, N = 3, ZeRO 1, packed rows): unnamed; update: off by 0.1" in text


def test_summary_counts_half_for_one_of_several() -> None:
    summary = MIXED.summary
    assert (summary.cells, summary.caught, summary.wrongly_named, summary.usual_check_caught) == (6, 5, 1, 2)
    assert summary.rightly_named == (2 + 0.5) / 6
    text = as_plain_text(matrix_lines(MIXED))
    assert "caught          5 of 6; the usual check: 2" in text
    assert "1 run, no false alarm" in text


def test_a_false_alarm_is_told() -> None:
    alarm = CleanRecord(setting=setting(2), verdict="not_equivalent", causes=["ranks-summed"])
    shown = record(cell("x"), clean=[alarm])
    assert shown.summary.false_alarms == 1
    assert "false alarms    W = 2, N = 3, ZeRO 2, packed rows: not_equivalent ranks-summed" in as_plain_text(
        matrix_lines(shown)
    )


def test_the_record_is_json_with_its_schema() -> None:
    written = json.loads(MIXED.as_json())
    assert written["schema"] == "dsaccum.faults/1"
    assert written["cells"][0] == {
        "fault": "loss-not-scaled",
        "setting": {"ranks": 2, "accumulation_steps": 3, "zero_stage": 0, "packing": "packed"},
        "outcome": "named",
        "causes": ["loss-not-scaled"],
        "certain": False,
        "detail": "",
        "usual_check": "missed",
        "elapsed_s": None,
    }
    assert written["summary"]["caught"] == 5


def test_the_list_names_each_fault_once() -> None:
    text = as_plain_text(fault_lines({"loss-not-scaled": "nobody divides", "ranks-summed": "summed"}))
    assert text.startswith("loss-not-scaled\n                nobody divides\nranks-summed\n")
    assert "--inject" in text
