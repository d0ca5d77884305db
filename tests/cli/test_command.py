"""The ``dsaccum`` command: flags, exit codes, one line for every mistake, and a start that loads nothing heavy.

Run: pytest tests/cli/test_command.py -n 0. The verification itself is a stub; not covered: what it finds.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsaccum import __version__
from dsaccum.cli import main
from dsaccum.config.errors import ConfigError
from dsaccum.verification.cases.arguments import VerifyArguments
from dsaccum.verification.records.record import VerifyRecord
from tests.cli.conftest import StubVerify
from tests.report import records

pytestmark = pytest.mark.usefixtures("in_a_folder")
HEAVY = {"torch", "deepspeed", "transformers", "datasets", "numpy", "pydantic"}
REPOSITORY = Path(__file__).parents[2]


def run(*words: str) -> int:
    return main(["verify", "--deepspeed", "ds.json", *words])


def python(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment, **options
    )


# --- flags ---


def test_all_flags_reach_the_verification(stub: StubVerify, in_a_folder: Path) -> None:
    (in_a_folder / "loops.py").write_text("def mine(engine, micro_batch): ...")
    words = ["--experiment", "e.yaml", "--ranks", "2", "--steps", "5", "--accum-steps", "4", "--micro-batch", "3",
             "--loop", "loops.py:mine", "--inject", "loss-scaled-twice", "--no-remedies", "--strict", "--full-size",
             "--verbose", "--set", "data.seed=1", "--set", "run.seed=2"]  # fmt: skip
    run(*words)
    [(arguments, pools)] = stub.calls
    assert arguments == VerifyArguments(
        deepspeed=Path("ds.json"), experiment=Path("e.yaml"), ranks=2, steps=5, accumulation_steps=4, micro_batch=3,
        loop="loops.py:mine", fault="loss-scaled-twice", remedies=False, strict=True, full_size=True,
        overrides=("data.seed=1", "run.seed=2"), verbose=True,
        command=("dsaccum", "verify", "--deepspeed", "ds.json", *words),
    )  # fmt: skip
    assert pools is None


def test_defaults(stub: StubVerify) -> None:
    assert run() == 0
    command = ("dsaccum", "verify", "--deepspeed", "ds.json")
    assert stub.calls[0][0] == VerifyArguments(deepspeed=Path("ds.json"), command=command)


@pytest.mark.parametrize("words", [["--deepspeed", "--deepspeed_config", "ds.json"],
                                   ["--deepspeed_config=ds.json", "--deepspeed"], ["--deepspeed=ds.json"]])  # fmt: skip
def test_both_spellings_of_the_config(words: list[str], stub: StubVerify) -> None:
    assert main(["verify", *words, "--steps", "2"]) == 0
    assert stub.calls[0][0].deepspeed == Path("ds.json")
    assert stub.calls[0][0].command[2:] == (*words, "--steps", "2"), "the record has the words as they were given"


def test_help_has_the_flags_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in ("deepspeed", "experiment", "ranks", "steps", "accum-steps", "micro-batch", "loop", "inject",
                 "no-remedies", "strict", "full-size", "resume", "json", "html", "verbose", "set"):  # fmt: skip
        assert f"--{flag} " in shown


def test_version_and_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dsaccum {__version__}\n"
    assert main([]) == 0
    assert "verify" in capsys.readouterr().out


# --- mistakes ---


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "--stepz", "3"], "error: --stepz: there is no such flag; fix: --steps"),
        (["verify", "--zzz"], "error: --zzz: there is no such flag; fix: see dsaccum verify --help"),
        (["--verzion"], "error: --verzion: there is no such flag; fix: --version"),
        (["verfy"], "error: there is no command 'verfy'; fix: dsaccum verify"),
        (["verify", "--ranks", "two"], 'error: --ranks = "two": is no whole number; fix: see dsaccum verify --help'),
        (["verify", "--ranks=1.5"], 'error: --ranks = "1.5": is no whole number; fix: see dsaccum verify --help'),
        (["verify", "--ranks"], "error: --ranks: needs a value; fix: see dsaccum verify --help"),
        (["verify"], "error: --deepspeed: no DeepSpeed JSON was given; fix: --deepspeed ds_configs/accum4.json"),
        (["verify", "--deepspeed", "x", "y"], "error: command line: got unexpected extra argument"),
        (
            ["verify", "--deepspeed", "x", "--ranks", "0"],
            "error: --ranks = 0: is no number of ranks; allowed: 1 or more",
        ),
        (["verify", "--deepspeed", "x", "--micro-batch", "-1"], "error: --micro-batch = -1: is no micro-batch size"),
        (
            ["verify", "--deepspeed", "x", "--accum-steps", "0"],
            "error: --accum-steps = 0: is no number of accumulation",
        ),
        (["verify", "--deepspeed", "x", "--steps", "65"], "error: --steps = 65: is no number of steps that can"),
        (["verify", "--deepspeed", "x.json"], "error: x.json: there is no such file"),
        (["verify", "--deepspeed", "dz.json"], "error: dz.json: there is no such file; fix: ds.json"),
        (["verify", "--deepspeed", "e.yaml"], "error: e.yaml: line 1"),
        (["verify", "--deepspeed", "ds.json", "--experiment", "x.yaml"], "error: x.yaml: there is no such file"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], said: str, stub: StubVerify, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(said)
    assert shown.err.count("\n") == 1
    assert (shown.out, stub.calls) == ("", [])


def test_a_record_in_the_way_is_refused_before_any_work(
    stub: StubVerify, in_a_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = in_a_folder / "out.json"
    path.write_text("precious")
    (in_a_folder / "out-2.json").touch()
    assert run("--json", "out.json") == 2
    assert "records don't overwrite one another; fix: --json out-3.json, or delete it" in capsys.readouterr().err
    path.unlink()
    path.symlink_to("nowhere.json")
    assert run("--json", "out.json") == 2
    assert run("--json", "no/such/out.json") == 2
    assert "there is no such directory; fix: mkdir -p no/such" in capsys.readouterr().err
    assert stub.calls == []


def test_a_page_in_the_way_is_refused_before_any_work(
    stub: StubVerify, in_a_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_a_folder / "out.html").write_text("precious")
    for flags, said in [
        (["--html", "out.html"], 'error: --html = "out.html": is there already'),
        (["--html", "no/such/out.html"], "there is no such directory; fix: mkdir -p no/such"),
        (["--json", "same", "--html", "same"], 'error: --html = "same": is what --json is to write'),
    ]:
        assert run(*flags) == 2
        shown = capsys.readouterr().err
        assert said in shown
        assert shown.count("\n") == 1
    assert stub.calls == []
    assert (in_a_folder / "out.html").read_text() == "precious"


# --- outcomes ---


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


# --- processes ---


@pytest.mark.parametrize("words", [["--help"], ["verify", "--help"], ["--version"], ["verify", "--stepz"],
                                   ["verify", "--deepspeed", "x", "--loop", "y"],
                                   ["verify", "--deepspeed", "x.json"]])  # fmt: skip
def test_start_loads_nothing_heavy(words: list[str]) -> None:
    code = f"import sys; from dsaccum.cli import main; main({words}); print('loaded', *sys.modules)"
    loaded = set(python(code).stdout.splitlines()[-1].split()[1:])
    # newer typers import pydantic themselves
    assert HEAVY & loaded <= {"pydantic"}
    assert "dsaccum.verification.records.record" not in loaded


@pytest.mark.parametrize("command", [None, "verify", "faults", "audit", "bench", "plan", "doctor", "report"])
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
