"""The ``dsaccum`` command: flags, and one line for every mistake.

Run: pytest tests/cli/test_command.py -n 0. The verification itself is a stub; not covered: what it finds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsaccum import __version__
from dsaccum.cli import main
from dsaccum.verification.cases.arguments import VerifyArguments
from tests.cli.conftest import StubVerify, run

pytestmark = pytest.mark.usefixtures("in_a_folder")


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
