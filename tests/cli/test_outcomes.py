"""How ``dsaccum verify`` ends: exit codes, the report and the record, and one line where there is no verdict.

Run: pytest tests/cli/test_outcomes.py -n 0. The verification itself is a stub; not covered: what it finds.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from dsaccum.config.errors import ConfigError
from dsaccum.verification.records.record import VerifyRecord
from tests.cli.conftest import StubVerify, run
from tests.report import records

pytestmark = pytest.mark.usefixtures("in_a_folder")


def test_equivalent_is_0_with_report_and_record(
    stub: StubVerify, in_a_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--json", "out.json") == 0
    shown = capsys.readouterr()
    assert "verdict         EQUIVALENT" in shown.out
    assert "comparing" in shown.err
    assert VerifyRecord.read(in_a_folder / "out.json") == stub.result


def test_a_page_is_written_beside_the_record(stub: StubVerify, in_a_folder: Path) -> None:
    stub.result = records.loss_scaled_twice()
    assert run("--json", "out.json", "--html", "out.html") == 1
    assert "loss-scaled-twice" in (in_a_folder / "out.html").read_text()
    stub.result = records.record()
    assert run("--html", "right.html") == 0
    assert "loss-scaled-twice" not in (in_a_folder / "right.html").read_text()


def test_not_equivalent_is_1(stub: StubVerify, capsys: pytest.CaptureFixture[str], in_a_folder: Path) -> None:
    stub.result = records.loss_scaled_twice()
    assert run("--json", "out.json") == 1
    assert "cause           loss-scaled-twice (certain)" in capsys.readouterr().out
    assert json.loads((in_a_folder / "out.json").read_text())["verdict"] == "not_equivalent"


def test_no_verdict_is_3_with_report_and_record(
    stub: StubVerify, capsys: pytest.CaptureFixture[str], in_a_folder: Path
) -> None:
    stub.result = records.untested_update()
    assert run("--json", "out.json") == 3
    shown = capsys.readouterr()
    assert "gradient, clipping, loss" in shown.out
    assert shown.err.splitlines()[-1] == (
        "error: there is no verdict: update is untested: there is no reference for the optimizer Lion"
    )
    assert json.loads((in_a_folder / "out.json").read_text())["verdict"] is None


def test_strict_is_3_where_anything_is_open(stub: StubVerify, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--strict") == 0
    stub.result = records.record(unavailable=["FusedAdam was replaced"])
    assert run() == 0
    assert run("--strict") == 3
    assert capsys.readouterr().err.endswith("error: --strict: substituted: FusedAdam was replaced\n")
    stub.result = records.loss_scaled_twice()  # something is substituted there too
    assert run("--strict") == 1, "a difference that was found stands"


def test_wrong_input_is_2(stub: StubVerify, capsys: pytest.CaptureFixture[str]) -> None:
    stub.result = ConfigError("is no whole number", source="ds.json", key="train_batch_size", value="x")
    assert run() == 2
    assert capsys.readouterr().err.splitlines()[-1] == 'error: ds.json: train_batch_size = "x": is no whole number'


def test_a_failed_rank_is_3_and_its_last_lines_are_there_if_wanted(
    stub: StubVerify, capsys: pytest.CaptureFixture[str]
) -> None:
    from dsaccum.verification.ranks.failed import RankFailed

    stub.result = RankFailed(1, "step 2", "rank 1 has ended in step 2", "out of\nmemory")
    assert run() == 3
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == "error: rank 1 has ended in step 2; --verbose shows its last lines"
    assert run("--verbose") == 3
    assert capsys.readouterr().err.endswith("out of\nmemory\nerror: rank 1 has ended in step 2\n")


def test_what_nobody_foresaw_is_3_and_one_line(stub: StubVerify, capsys: pytest.CaptureFixture[str]) -> None:
    stub.result = RuntimeError("two\nlines")
    assert run() == 3
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == "error: RuntimeError: two lines; --verbose shows the traceback"
    assert "Traceback" not in said
    assert run("--verbose") == 3
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.endswith("error: RuntimeError: two lines\n")


def test_interrupted_is_3(stub: StubVerify, capsys: pytest.CaptureFixture[str]) -> None:
    stub.result = KeyboardInterrupt()
    assert run() == 3
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted; nothing is proven"


def test_terminated_is_3_with_a_line(stub: StubVerify, capsys: pytest.CaptureFixture[str]) -> None:
    def terminated() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)

    before = signal.getsignal(signal.SIGTERM)
    stub.result = terminated
    assert run() == 3
    assert capsys.readouterr().err.splitlines()[-1] == "error: terminated (SIGTERM); nothing is proven"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_record_that_came_meanwhile_is_kept(
    stub: StubVerify, in_a_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = in_a_folder / "out.json"

    def somebody_was_faster() -> VerifyRecord:
        path.write_text("theirs")
        return records.record()

    stub.result = somebody_was_faster
    assert run("--json", "out.json") == 3
    assert path.read_text() == "theirs"
    shown = capsys.readouterr()
    assert "EQUIVALENT" in shown.out, "the report is not lost"
    assert "could not be written to out.json: File exists" in shown.err
