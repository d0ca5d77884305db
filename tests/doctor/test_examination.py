"""All checks together: nothing stops them, nothing heavy is loaded, nothing is changed; and how it reads.

Run: pytest tests/doctor/test_examination.py -n 0. Not covered: how long a machine with many GPUs takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsaccum.doctor.examination import CHECKS, Check, examine
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.machine import Machine, in_background, python
from dsaccum.doctor.table import finding_lines
from dsaccum.report.layout import as_plain_text
from tests.docs.markdown import REPOSITORY
from tests.doctor import planting

FINE = Finding("cores", "2")
NOTE = Finding("C++ compiler", "none", "note", "FusedAdam cannot be compiled", "sudo apt-get install g++")
LONG_FIX = f"rm '{'long/' * 30}lock'"
PROBLEM = Finding("stale lock", "op/lock, 90 min old", "problem", "whoever needs op waits for ever", LONG_FIX)


def text(*findings: Finding) -> str:
    return as_plain_text(finding_lines(findings))


# --- the examination ---


def test_findings_come_in_the_order_of_the_checks(bare: Machine) -> None:
    def slow(machine: Machine) -> Iterator[Finding]:
        time.sleep(0.1)
        yield FINE

    found = examine(bare, [Check("slow", slow), Check("quick", lambda machine: [NOTE, PROBLEM])])
    assert found == [FINE, NOTE, PROBLEM]


def test_a_check_that_fails_or_hangs_stops_no_other(bare: Machine) -> None:
    released = threading.Event()

    def hangs(machine: Machine) -> list[Finding]:
        released.wait(30)
        return []

    def fails(machine: Machine) -> list[Finding]:
        raise PermissionError(13, "Permission denied")

    checks = [Check("hangs", hangs), Check("fails", fails), Check("works", lambda machine: [FINE])]
    began = time.monotonic()
    hung, failed, worked = examine(bare, checks, limit_s=0.2)
    released.set()
    assert time.monotonic() - began < 5
    assert (hung.name, hung.found, hung.state) == ("hangs", "no answer in time", "note")
    assert (failed.name, failed.consequence) == ("fails", "PermissionError: [Errno 13] Permission denied")
    assert worked == FINE


def test_a_check_that_hangs_does_not_keep_the_process() -> None:
    code = (
        "import time; from dsaccum.doctor.examination import Check, examine;"
        "from dsaccum.doctor.machine import Machine;"
        "print(examine(Machine(), [Check('x', lambda machine: time.sleep(60))], limit_s=0.1)[0].found)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.stdout == "no answer in time\n", result.stderr


def test_this_machine_is_looked_at_whole_and_left_as_it_was(tmp_path: Path) -> None:
    """Every check gives an answer, whatever the machine; folders that it looks at stay empty."""
    (tmp_path / "cache").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache"),
                   "HF_HOME": str(tmp_path / "hub")}  # fmt: skip
    code = (
        "import sys; from dsaccum.doctor.examination import examine; from dsaccum.doctor.machine import Machine;"
        "print([(each.name, each.consequence) for each in examine(Machine()) if each.found.startswith('could not')]);"
        "print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, env=environment)
    failed, loaded = result.stdout.splitlines()
    assert failed == "[]"
    assert not {"torch", "deepspeed", "transformers", "datasets", "numpy"} & set(loaded.split())
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["cache"]


def test_names_fit_the_table() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(len(check.name) < 16 for check in CHECKS)


def test_a_problem_has_a_consequence_and_a_fix() -> None:
    for consequence, fix in (("", "rm x"), ("it hangs", "")):
        with pytest.raises(ValueError, match="needs a consequence and a fix"):
            Finding("lock", "old", "problem", consequence, fix)


# --- the machine ---


def test_commands_are_waited_for_so_long_at_most(root: Path) -> None:
    machine = planting.machine(root)
    planting.command(root, "sleeps", "exec /bin/sleep 60")
    began = time.monotonic()
    assert machine.answer(str(root / "bin/sleeps"), within_s=0.2).error == "no answer within 0.2 s"
    assert machine.answer(str(root / "bin/absent"), within_s=5).code is None
    assert time.monotonic() - began < 5


def test_in_the_background_errors_come_back() -> None:
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0).result(timeout=5)


def test_the_interpreter_is_called_python_only_where_that_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planting.command(tmp_path, "python", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert python() == sys.executable
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python3"))
    assert python() == "python"


# --- the table ---


def test_nothing_wrong() -> None:
    assert text(FINE) == "cores           2\n\nsummary         no problem"


def test_a_problem_and_a_note() -> None:
    lines = text(FINE, NOTE, PROBLEM).splitlines()
    assert lines[1:5] == [
        "C++ compiler    note: none",
        "stale lock      problem: op/lock, 90 min old",
        "",
        "summary         1 problem, 1 note",
    ]
    assert lines[6:] == [
        "problem         stale lock: op/lock, 90 min old",
        "                whoever needs op waits for ever",
        f"fix             {LONG_FIX}",
        "",
        "note            C++ compiler: none",
        "                FusedAdam cannot be compiled",
        "fix             sudo apt-get install g++",
    ], "problems come first; a fix is one line, however long"


def test_the_limits_hold_for_commands_in_every_check() -> None:
    """No check starts a process by another way than ``Machine.answer``, which needs a limit."""
    sources = {path: path.read_text() for path in (REPOSITORY / "dsaccum/doctor").glob("*.py")}
    assert [path.name for path, source in sources.items() if "subprocess" in source] == ["machine.py"]
