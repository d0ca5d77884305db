"""The ``dsaccum`` command as a process: a start that loads nothing heavy, and streams that are closed or cannot show.

Run: pytest tests/cli/test_processes.py -n 0. The verification itself is a stub; not covered: what it finds.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("in_a_folder")
HEAVY = {"torch", "deepspeed", "transformers", "datasets", "numpy", "pydantic"}
REPOSITORY = Path(__file__).parents[2]


def python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment, **options
    )


@pytest.mark.parametrize("words", [["--help"], ["verify", "--help"], ["--version"], ["verify", "--stepz"],
                                   ["verify", "--deepspeed", "x", "--loop", "y"],
                                   ["verify", "--deepspeed", "x.json"]])  # fmt: skip
def test_start_loads_nothing_heavy(words: list[str]) -> None:
    code = f"import sys; from dsaccum.cli import main; main({words}); print('loaded', *sys.modules)"
    loaded = set(python(code).stdout.splitlines()[-1].split()[1:])
    # newer typers import pydantic themselves
    assert HEAVY & loaded <= {"pydantic"}
    assert "dsaccum.verification.records.record" not in loaded


@pytest.mark.parametrize("command", [None, "verify", "plan"])
def test_help_reads_no_files_and_needs_nothing_that_does(command: str | None) -> None:
    words = [command, "--help"] if command else ["--help"]
    code = f"import sys; from dsaccum.cli import main; main({words}); print('loaded', *sys.modules)"
    loaded = set(python(code).stdout.splitlines()[-1].split()[1:])
    typers_own = {"pydantic"} if command else set()  # for a command's options, from 0.29 on
    assert not {*HEAVY, "yaml"} & (loaded - typers_own)


def test_help_takes_less_than_a_second() -> None:
    """Of computing; what the clock says depends on the neighbours, and so does the worst of several."""

    def computing() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    seconds = []
    for _ in range(3):
        before = computing()
        python("from dsaccum.cli import main; main(['verify', '--help'])")
        seconds.append(computing() - before)
    assert min(seconds) < 1.0


@pytest.mark.parametrize("module", ["dsaccum", "dsaccum.testing", "dsaccum.testing_plugin"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    result = python(f"import sys, {module}; print(*sys.modules)")
    assert not {*HEAVY, "typer", "rich"} & set(result.stdout.split())


def test_python_m_and_the_installed_command_are_the_same() -> None:
    for command in ([sys.executable, "-m", "dsaccum"], [Path(sys.executable).with_name("dsaccum")]):
        result = subprocess.run([*command, "verify", "--x"], capture_output=True, text=True)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == "error: --x: there is no such flag; fix: see dsaccum verify --help\n"


STUBBED = """
import sys, types
from tests.report import records
module = types.ModuleType("dsaccum.verification.verify")
module.verify = lambda arguments, progress, pools=None: records.record(fault="\\u2713")
sys.modules[module.__name__] = module
from dsaccum.cli import main
sys.exit(main(["verify", "--deepspeed", "ds.json"]))
"""


def test_a_reader_that_went_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    try:
        result = subprocess.run(
            [sys.executable, "-c", STUBBED], stdout=writing, stderr=subprocess.PIPE, text=True, env=environment
        )
    finally:
        os.close(writing)
    assert result.returncode == 0
    assert "Error" not in result.stderr


def test_a_character_that_the_output_cannot_show_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", STUBBED], capture_output=True, text=True, env=environment)
    assert result.returncode == 0
    assert "\\u2713" in result.stdout
