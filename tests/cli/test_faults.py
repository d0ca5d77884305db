"""``dsaccum faults``: the list is there at once, and names every fault that can be put in.

Run: pytest -n 0 tests/cli/test_faults.py. Not covered: ``--run`` (tests/power).
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from dsaccum.cli.app import main
from dsaccum.report.fault_matrix import ONLY_ON_A_GPU
from dsaccum.verification.subject.faults import FAULTS, OF_RESUMPTION

_SLOW = {"torch", "deepspeed", "transformers", "numpy"}


def test_every_fault_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults"]) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith(" ")]
    assert set(FAULTS | OF_RESUMPTION) == {line for line in listed if not line.startswith("next")}


def test_what_no_cpu_can_show_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    main(["faults"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("needs a GPU") == len(ONLY_ON_A_GPU)
    assert set(ONLY_ON_A_GPU) <= FAULTS.keys()


def test_what_only_a_continued_run_shows_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    main(["faults"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("verify --resume DIR alone") == len(OF_RESUMPTION)


def test_the_list_loads_no_slow_library() -> None:
    code = f"import sys; from dsaccum.cli.app import main; main(['faults']); print({_SLOW} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "set()"
