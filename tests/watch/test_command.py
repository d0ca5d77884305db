"""``python -m dsaccum.watch``: the script sees what it would see without it, and exit codes are its own.

Run: pytest tests/watch/test_command.py. Not covered: torchrun and accelerate launch, which start the same module as the
deepspeed launcher does.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dsaccum.watch
from dsaccum.config.errors import ConfigError
from dsaccum.verification.records.watch import WatchClaims, WatchedRecord, WatchRecord, WindowRecord
from dsaccum.watch.arguments import parse_arguments, windows_of
from dsaccum.watch.command import main
from dsaccum.watch.proven import why_unproven
from dsaccum.watch.session import Session
from tests.watch.running import SCRIPTS


def command(words: list[str], folder: Path, *, launcher: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(launcher or [sys.executable, "-m"]), "dsaccum.watch", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent.parent.parent)},
    )


def test_the_script_sees_what_it_would_see_alone(tmp_path: Path) -> None:
    script = os.path.relpath(SCRIPTS / "says.py", tmp_path)
    watched = command(["--window", "2", "--", script, "--flag", "x", "7"], tmp_path)
    alone = subprocess.run([sys.executable, script, "--flag", "x", "7"], cwd=tmp_path, capture_output=True, text=True)
    assert json.loads(watched.stdout) == json.loads(alone.stdout)
    assert watched.returncode == alone.returncode == 7
    assert "nothing to watch" in watched.stderr


def test_a_script_that_raises_raises(tmp_path: Path) -> None:
    watched = command([str(SCRIPTS / "says.py"), "--loud"], tmp_path)
    assert watched.returncode == 1
    assert "ValueError: as it was told" in watched.stderr


@pytest.mark.slow
def test_fail_makes_a_bad_verdict_exit_code_1(tmp_path: Path) -> None:
    script = str(SCRIPTS / "plain_loop.py")
    wrong = command(
        ["--fail", "--json", "out.json", "--html", "out.html", "--", script, "--mistake", "divided-twice"], tmp_path
    )
    assert wrong.returncode == 1
    assert "loss-scaled-twice (certain)" in wrong.stderr
    record = WatchRecord.read(tmp_path / "out.json")
    assert record.verdict == "not_equivalent"
    assert record.engines[0].windows[0].causes[0].id == "loss-scaled-twice"
    assert "loss-scaled-twice" in (tmp_path / "out.html").read_text()
    assert command(["--", script, "--mistake", "divided-twice"], tmp_path).returncode == 0
    right = command(["--fail", "--stop-after-window", "--", script, "--save", "end.pt"], tmp_path)
    assert right.returncode == 0
    assert not (tmp_path / "end.pt").exists()


@pytest.mark.parametrize(
    ("code", "rank", "ends"), [("0", "0", 3), ("7", "0", 7), ("0", "1", 0)], ids=["nothing judged", "failed", "rank 1"]
)
def test_fail_does_not_pass_where_nothing_was_judged(
    code: str, rank: str, ends: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process; the script would clear its names, and those of pytest's own ``__main__`` are wanted yet."""
    (tmp_path / "quiet.py").write_text(f"raise SystemExit({code})")
    monkeypatch.setattr("dsaccum.watch.command.run_script", lambda path, words: runpy.run_path(path))
    monkeypatch.setattr("sys.argv", ["dsaccum.watch", "--fail", "--", str(tmp_path / "quiet.py")])
    monkeypatch.setenv("RANK", rank)
    assert main() == ends
    assert ("exit code 3" in capsys.readouterr().err) == (ends == 3)


def test_what_is_not_proven_and_why() -> None:
    def record(verdict: Any, **changes: Any) -> WatchRecord:
        claims = WatchClaims(weighting="pass", gradient="pass")
        if verdict is None:
            claims = WatchClaims(weighting="untested", gradient="pass", memory="untested")
        reasons = {"weighting": "no logits", "memory": "one micro-step"} if verdict is None else {}
        window = WindowRecord.model_construct(window=3, verdict=verdict, claims=claims, reasons=reasons)
        engines = [WatchedRecord.model_construct(number=1, kind="bare", windows=[window])]
        return WatchRecord.model_construct(**{"verdict": verdict, "engines": engines, "unproven": [], **changes})

    assert why_unproven(record("equivalent"), (3,)) is None
    assert why_unproven(record("not_equivalent"), (3, 5)) is None
    assert why_unproven(record("equivalent"), (3, 5)) == "not all windows that were asked for came"
    assert why_unproven(record("equivalent", unproven=["a pipeline engine"]), (3,)) == "not all that trains was watched"
    assert why_unproven(record(None), (3,)) == "the verdict is NONE; weighting not tested: no logits"
    assert why_unproven(record(None, engines=[]), (3,)) == "no window was judged"


@pytest.mark.slow
@pytest.mark.distributed
def test_the_deepspeed_launcher_starts_it(tmp_path: Path) -> None:
    """With ``--local_rank``, which the launcher puts before everything and the script has to get."""
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--module"]
    script = str(SCRIPTS / "deepspeed_loop.py")
    ended = command(["--json", "out.json", "--fail", "--", script, "--stage", "2"], tmp_path, launcher=launcher)
    assert ended.returncode == 0, ended.stderr[-2000:]
    record = WatchRecord.read(tmp_path / "out.json")
    assert record.verdict == "equivalent"
    assert record.engines[0].windows[0].effective_batch.world_size == 2


def test_flags_end_where_the_script_begins(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    arguments = parse_arguments(["--local_rank=1", "--window=2,4-5", "--fail", "--", str(script), "--fail", "--", "x"])
    assert arguments is not None
    assert arguments.windows == (2, 4, 5)
    assert arguments.words == ("--local_rank=1", "--fail", "--", "x")
    assert parse_arguments([str(script), "--window", "9"]).words == ("--window", "9")  # type: ignore[union-attr]
    assert parse_arguments(["--help"]) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--windw", "3", "x.py"], "--windw: there is no such flag"),
        ([], "there is no script"),
        (["--", "missing.py"], "missing.py"),
        (["--window", "0", "x.py"], "--window: is no optimizer step"),
        (["--window"], "--window: needs a value"),
        (["--json", "--fail", "--", "x.py"], "--json: needs a value"),
        (["--window", "3-2", "x.py"], "--window: is no optimizer step"),
        (["--window", "2-3-4", "x.py"], "--window: is no optimizer step"),
        (["--window", "\u00b2", "x.py"], "--window: is no optimizer step"),
        (["--window", "1-999999999999", "x.py"], "--window: is too many"),
        (["."], "is a directory"),
        (["--fail=1", "x.py"], "--fail: there is no such flag"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    with pytest.raises(ConfigError) as raised:
        parse_arguments(words)
    assert said.split(":")[0] in str(raised.value)
    assert said.rpartition(": ")[2] in str(raised.value)


def test_records_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    (tmp_path / "there.json").write_text("{}")
    with pytest.raises(ConfigError, match="overwrite"):
        parse_arguments(["--json", str(tmp_path / "there.json"), "--", str(tmp_path / "x.py")])


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_files_are_looked_at_before_the_script_runs(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, there = tmp_path / "x.py", tmp_path / "there"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    there.write_text("precious")
    for path, said in [(there, "is there already"), (tmp_path / "no/such", "there is no such directory")]:
        monkeypatch.setattr("sys.argv", ["dsaccum.watch", flag, str(path), "--", str(script)])
        assert main() == 2
        shown = capsys.readouterr().err
        assert said in shown
        assert f"{flag} = " in shown
        assert shown.count("\n") == 1
    assert there.read_text() == "precious"
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigError, match="is what --json is to write"):
        parse_arguments(["--json", "same", "--html", "same", "--", str(script)])


def test_a_session_refuses_a_file_that_is_there(tmp_path: Path) -> None:
    for name in ("json", "html"):
        (tmp_path / name).write_text("precious")
        with pytest.raises(ConfigError, match="is there already"):
            Session(**{name: tmp_path / name})
        assert (tmp_path / name).read_text() == "precious"


def test_a_module_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["dsaccum.watch", "--", "-m", "no_such.module"])
    assert main() == 2
    assert '-m = "no_such.module": there is no such module' in capsys.readouterr().err


def test_files_go_where_they_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever directory the script changes to."""
    monkeypatch.chdir(tmp_path)
    session = Session(json="out.json", html="out.html")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    session.end()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out.html", "out.json"]


@pytest.mark.parametrize("windows", [(), (0,), (2, -1), ("3",)])
def test_a_session_refuses_windows_that_are_none(windows: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="is no optimizer step"):
        Session(windows)


def test_a_module_of_that_name_which_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script's own ``deepspeed.py`` is imported as it would be."""
    (tmp_path / "deepspeed.py").write_text("OWN = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    session = Session(report=lambda record: None)
    import deepspeed

    assert deepspeed.OWN
    session.end()
    del sys.modules["deepspeed"]


def test_a_stream_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(report=lambda record: None)
    monkeypatch.setattr("sys.stderr", None)
    session.end()
    assert len(session.record.messages) == 1


def test_a_session_that_saw_nothing_writes_both_and_fails_at_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(json=tmp_path / "out.json", html=tmp_path / "out.html")
    session.end()
    assert WatchRecord.read(tmp_path / "out.json").verdict is None
    assert "NONE: no window was looked at" in (tmp_path / "out.html").read_text()
    late = Session(json=tmp_path / "late.json", html=tmp_path / "late.html")
    (tmp_path / "late.json").write_text("precious")
    monkeypatch.setattr("dsaccum.report.html.page.as_html", lambda record: 1 / 0)
    late.end()
    shown = capsys.readouterr().err
    assert "the record could not be written" in shown
    assert "the report could not be written" in shown
    assert "ZeroDivisionError" in shown
    assert (tmp_path / "late.json").read_text() == "precious"


def test_attaching_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """The function's name must not become that of a module which it imports."""
    for _ in range(2):
        session = dsaccum.watch.attach(window=2, report=lambda record: None)
        session.end()
        assert session.verdict is None
    assert capsys.readouterr().err.count("nothing to watch") == 2


def test_windows_are_numbers_lists_and_ranges() -> None:
    assert windows_of("3") == (3,)
    assert windows_of("5,2-3") == (2, 3, 5)
