"""Scripts in a test suite: watched in processes of their own, with a limit, and nothing is left behind.

Run: pytest tests/watch/test_launch.py -n 0. Not covered: scripts that clear their environment, whose processes are then
not found.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from dsaccum.config.errors import ConfigError
from dsaccum.testing import ScriptFailed, assert_script_equivalent, watch_script
from dsaccum.verification.records.watch import WatchedRecord, WatchRecord, WindowRecord
from tests.watch.running import SCRIPTS

PLAIN, DEEPSPEED = str(SCRIPTS / "plain_loop.py"), str(SCRIPTS / "deepspeed_loop.py")
HERE = {"PYTHONPATH": str(SCRIPTS.parents[2])}


def alive(pids: Path) -> list[int]:
    return [int(pid) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]


def test_a_right_script_passes(tmp_path: Path) -> None:
    record = assert_script_equivalent(PLAIN, "--save", str(tmp_path / "end.pt"), window=2, environment=HERE)
    assert [window.window for engine in record.engines for window in engine.windows] == [2]
    assert not (tmp_path / "end.pt").exists(), "it was ended after the window"
    assert record.command[-2:] == ["--save", str(tmp_path / "end.pt")]


def test_a_wrong_script_fails_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if DeepSpeed had run in this process: the script must not take itself for one of its ranks."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AssertionError) as raised:
        assert_script_equivalent(PLAIN, "--mistake", "divided-twice", environment=HERE)
    said = str(raised.value)
    assert said.startswith("WRONG: 4 micro-batches on 1 rank are not one batch")
    for words in ("loss-scaled-twice (certain)", "fix  ", "micro-step 4  0.2500     0.0625", "weighting: rank 0"):
        assert words in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.slow
def test_a_window_that_does_not_come_is_no_proof() -> None:
    with pytest.raises(AssertionError) as raised:
        assert_script_equivalent(PLAIN, window=(2, 99), environment=HERE)
    assert str(raised.value).startswith("RIGHT: ")
    assert "was not reached: optimizer 1 made" in str(raised.value)
    assert "not all windows that were asked for came" in str(raised.value)


def test_an_engine_that_is_refused_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the others are; it is the record that counts, and not the launch."""
    refused = "not watched: a pipeline engine; the script goes on"
    right = WindowRecord.model_construct(window=3, verdict="equivalent")
    engine = WatchedRecord.model_construct(number=1, kind="DeepSpeed", windows=[right, right])
    record = WatchRecord.model_construct(verdict="equivalent", engines=[engine], messages=[refused], unproven=[refused])
    monkeypatch.setattr("dsaccum.testing.watch_script", lambda *_, **__: record)
    with pytest.raises(AssertionError) as raised:
        assert_script_equivalent(PLAIN)
    assert refused in str(raised.value)
    assert str(raised.value).endswith("not all that trains was watched")
    record.unproven.clear()
    assert assert_script_equivalent(PLAIN) is record


@pytest.mark.distributed
def test_on_ranks() -> None:
    record = assert_script_equivalent(DEEPSPEED, "--stage", "1", ranks=2, environment=HERE)
    [engine] = record.engines
    assert engine.windows[0].effective_batch.world_size == 2


@pytest.mark.slow
@pytest.mark.distributed
def test_a_wrong_script_on_ranks() -> None:
    with pytest.raises(AssertionError, match="ranks-share-data"):
        assert_script_equivalent(PLAIN, "--mistake", "same-data", ranks=2, environment=HERE)


@pytest.mark.slow
def test_of_two_engines_both_are_looked_at_before_the_script_is_ended() -> None:
    words = ("--stage", "0", "--mistake", "critic-divided-twice")
    record = watch_script(str(SCRIPTS / "two_engines.py"), *words, ranks=1, environment=HERE)
    assert [engine.windows[0].verdict for engine in record.engines] == ["equivalent", "not_equivalent"]


@pytest.mark.slow
def test_to_the_end(tmp_path: Path) -> None:
    watch_script(PLAIN, "--save", "end.pt", window=2, to_the_end=True, folder=tmp_path, environment=HERE)
    assert (tmp_path / "end.pt").exists()


def test_a_script_that_fails_shows_its_last_lines() -> None:
    with pytest.raises(ScriptFailed) as raised:
        watch_script(str(SCRIPTS / "says.py"), "--loud", environment=HERE)
    assert "says.py ended with exit code 1\n" in str(raised.value)
    assert "ValueError: as it was told" in str(raised.value)
    assert len(str(raised.value).splitlines()) <= 41


def test_a_script_that_leaves_no_record(tmp_path: Path) -> None:
    (tmp_path / "quits.py").write_text("import os\nos._exit(0)")
    with pytest.raises(ScriptFailed, match=r"quits\.py ended without a record"):
        watch_script("quits.py", folder=tmp_path, environment=HERE)


@pytest.mark.parametrize("ranks", [None, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.distributed])])
def test_a_script_that_takes_too_long_is_ended_with_all_that_it_started(ranks: int | None, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(ScriptFailed, match=r"did not end in 20 s, and was ended"):
        watch_script(str(SCRIPTS / "never_ends.py"), str(pids), ranks=ranks, timeout_s=20, environment=HERE)
    assert alive(pids) == []


def test_what_an_ended_script_left_is_ended_too(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    record = watch_script(str(SCRIPTS / "never_ends.py"), str(pids), "--and-end", environment=HERE)
    assert record.verdict is None
    assert len(pids.read_text().split()) == 2
    assert alive(pids) == []


def test_the_control_of_what_is_left(tmp_path: Path) -> None:
    """This process is alive, and none of the others is touched."""
    (tmp_path / "pids").write_text(str(os.getpid()))
    assert alive(tmp_path / "pids") == [os.getpid()]


@pytest.mark.parametrize(
    ("script", "ranks", "said"),
    [
        ("missing.py", None, 'script = "missing.py": there is no such file'),
        (PLAIN, 0, "ranks = 0: is no number of ranks"),
    ],
)
def test_mistakes_are_one_line(script: str, ranks: int | None, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        watch_script(script, ranks=ranks)
    assert said in str(raised.value)
