"""``dsaccum doctor``: exit codes, the record, mistakes in flags.

Run: pytest tests/cli/test_doctor.py -n 0. The examination is a stub, but for one; not covered: what it finds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsaccum.cli import main
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine
from dsaccum.doctor.record import DoctorRecord, FindingRecord

FINE = Finding("cores", "2")
NOTE = Finding("C++ compiler", "none", "note", "FusedAdam cannot be compiled", "sudo apt-get install g++")
PROBLEM = Finding("stale lock", "op/lock, 90 min old", "problem", "it hangs", "rm op/lock")

pytestmark = pytest.mark.usefixtures("in_a_folder")


class StubExamination:
    def __init__(self) -> None:
        self.findings: list[Finding] = [FINE, NOTE]
        self.calls = 0

    def examine(self, machine: Machine) -> list[Finding]:
        self.calls += 1
        return self.findings


@pytest.fixture
def examination(monkeypatch: pytest.MonkeyPatch) -> StubExamination:
    stub = StubExamination()
    monkeypatch.setattr("dsaccum.doctor.examination.examine", stub.examine)
    return stub


def test_no_problem_is_0(examination: StubExamination, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr()
    assert "summary         no problem, 1 note\n" in shown.out
    assert shown.err == ""


def test_a_problem_is_1_and_its_fix_is_shown(examination: StubExamination, capsys: pytest.CaptureFixture[str]) -> None:
    examination.findings.append(PROBLEM)
    assert main(["doctor"]) == 1
    assert "fix             rm op/lock\n" in capsys.readouterr().out


def test_the_record(examination: StubExamination, in_a_folder: Path) -> None:
    examination.findings.append(PROBLEM)
    assert main(["doctor", "--json", "out.json"]) == 1
    record = DoctorRecord.read(in_a_folder / "out.json")
    assert record.findings == [FindingRecord.of(each) for each in (FINE, NOTE, PROBLEM)]
    written = json.loads((in_a_folder / "out.json").read_text())
    assert (written["schema"], written["verdict"]) == ("dsaccum.doctor/1", "problem")
    assert written["command"] == ["dsaccum", "doctor", "--json", "out.json"]
    assert written["findings"][0] == {"name": "cores", "found": "2", "state": "ok", "consequence": "", "fix": ""}
    assert written["versions"]["python"]
    assert main(["doctor", "--json", "out.json"]) == 2, "a record is never written over another file"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["doctor", "--jsn", "x"], "error: --jsn: there is no such flag; fix: --json"),
        (["doctor", "--json"], "error: --json: needs a value; fix: see dsaccum doctor --help"),
        (["doctor", "--json", "no/such/out.json"], 'error: --json = "no/such/out.json": there is no such directory'),
        (["doctor", "now"], "error: command line: got unexpected extra argument"),
    ],
)
def test_a_mistake_is_2_and_one_line(
    words: list[str], said: str, examination: StubExamination, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(said)
    assert shown.count("\n") == 1
    assert examination.calls == 0


def test_for_real_it_is_a_table_without_a_terminal() -> None:
    """On whatever machine this is: a summary, the exit code that goes with it, and no traceback."""
    result = subprocess.run([sys.executable, "-m", "dsaccum", "doctor"], capture_output=True, text=True, timeout=90)
    [summary] = [line for line in result.stdout.splitlines() if line.startswith("summary ")]
    assert result.returncode == (0 if summary.split()[1:3] == ["no", "problem"] else 1)
    assert result.returncode == 0 or summary.removeprefix("summary").strip()[0].isdigit()
    assert "\x1b" not in result.stdout
    assert result.stderr == ""
