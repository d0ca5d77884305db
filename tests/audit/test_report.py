"""The audit as it is printed: 80 columns, a capital for each cause, what it means, and the line on the user's config.

Run: pytest -n 0 tests/audit/test_report.py.
"""

from __future__ import annotations

import json

import pytest

from dsaccum.audit.record import UntestedRecord
from dsaccum.cli.audit import judged
from dsaccum.cli.outcome import ExitCode, NotCarriedOut
from dsaccum.report.audit_matrix import audit_lines
from dsaccum.report.layout import WIDTH, as_plain_text
from tests.audit.records import cell, own, record

MIXED = record(
    cell("own-loss"),
    cell("own-loss", "wrong", 0, "optimizer-count-offset", precision="bf16"),
    cell("own-loss", "right", 1, precision="bf16"),
    cell("flag", "wrong", 0, "loss-scaled-twice"),
    cell("flag", "right", 1),
    cell("two", "costly", 0),
    cell("two", "wrong", 1, "loss-scaled-twice"),
    cell("sync", "refused", 1, detail="AssertionError: no_sync is incompatible"),
    cell("sync", "untested", 0, detail="rank 1 hangs"),
    untested=[UntestedRecord(circumstance="fp16", reason="needs a GPU")],
    versions={"deepspeed": "0.19.8", "torch": "2.13.0"},
    elapsed_s=12.3,
)


def lines(shown: object = MIXED) -> list[str]:
    return as_plain_text(audit_lines(shown)).splitlines()  # type: ignore[arg-type]


def test_a_sign_for_each_cell() -> None:
    shown = lines()
    assert shown[0].split() == ["fp32", "bf16"]
    assert shown[1].split() == ["ZeRO", "0", "1", "0", "1"]
    rows = {line.split()[0]: line.split()[1:] for line in shown[2:6]}
    assert rows == {"own-loss": ["+", "B", "+"], "flag": ["A", "+"], "two": ["c", "A"], "sync": ["?", "-"]}
    assert all(len(line) <= WIDTH for line in shown)
    assert shown[0].index("bf16") == shown[1].index("0", 12), "a precision stands over its first stage"


def test_what_is_wrong_is_said_with_where() -> None:
    text = " ".join("\n".join(lines()).split())
    assert "A loss-scaled-twice: two layers divide" in text
    assert "flag; ZeRO 0 (1 cell)" in text
    assert "B optimizer-count-offset" in text
    assert "sync at ZeRO 1: AssertionError: no_sync is incompatible" in text
    assert "fp16: needs a GPU" in text
    assert "sync, ZeRO 0, fp32, AdamW, N = 4, clipping off: rank 1 hangs" in text
    assert "9: 3 right, 1 right, with more communication than is due, 3 wrong, 1 refused, 1 without a verdict" in text


def test_the_summary_counts_every_cell_once() -> None:
    counts = MIXED.summary
    assert (counts.cells, counts.right, counts.costly, counts.wrong, counts.refused, counts.untested) == (
        9,
        3,
        1,
        3,
        1,
        1,
    )


def test_the_users_config_has_a_line_of_its_own() -> None:
    good = record(cell("own-loss"), own=own(True, cell("own-loss"), cell("flag", "wrong", 1, "loss-scaled-twice")))
    text = " ".join("\n".join(lines(good)).split())
    assert "ds.json (ZeRO 1, fp32, AdamW, N = 4, clipping off): a good cell" in text
    assert "wrong with it: flag (loss-scaled-twice)" in text
    assert "NOT a good cell" in " ".join("\n".join(lines(record(own=own(False)))).split())


def test_exit_codes() -> None:
    """The user's config decides where there is one, else any wrong cell."""
    assert judged(record(cell("own-loss"), cell("sync", "refused"))) == ExitCode.EQUIVALENT
    assert judged(MIXED) == ExitCode.NOT_EQUIVALENT
    wrong = cell("flag", "wrong", 0, "loss-scaled-twice")
    assert judged(record(wrong, own=own(True))) == ExitCode.EQUIVALENT
    assert judged(record(cell("own-loss"), own=own(False))) == ExitCode.NOT_EQUIVALENT
    with pytest.raises(NotCarriedOut):
        judged(record(own=own(None)))


def test_the_record_is_json_with_its_schema() -> None:
    written = json.loads(MIXED.as_json())
    assert written["schema"] == "dsaccum.audit/1"
    assert written["summary"]["wrong"] == 3
    assert written["own"] is None
    assert written["cells"][1] == {
        "way": "own-loss",
        "circumstances": {
            "zero_stage": 0,
            "precision": "bf16",
            "optimizer": "AdamW",
            "accumulation_steps": 4,
            "clipping": "off",
        },
        "outcome": "wrong",
        "causes": ["optimizer-count-offset"],
        "certain": False,
        "detail": "",
        "weights": "",
        "elapsed_s": None,
    }
