"""Whatever happens to the watch, the script goes on, and one message says what it was.

Run: pytest tests/watch/test_unharmed.py. The control for each: the same script, watched without the trouble, elsewhere
in this folder. Not covered: a rank that dies.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsaccum.verification.records.watch import WatchRecord
from dsaccum.watch import watching
from dsaccum.watch.ranks import LONGEST_WAIT
from dsaccum.watch.recording import Recorder
from dsaccum.watch.session import Session
from dsaccum.watch.subjects.deepspeed import Refused, refuse_what_cannot_be_watched
from tests.watch.running import on_ranks, run_script


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("it broke")


def watch(script: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[WatchRecord, str]:
    session = Session(report=lambda record: None)
    try:
        run_script(script, words)
    finally:
        session.end()
    return session.record, capsys.readouterr().err


@pytest.mark.parametrize("where", ["recompute", "optimizer_saw", "GradientSketch"])
def test_a_failure_at_the_windows_end_is_one_message(
    where: str,
    one_rank: object,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    run_script("deepspeed_loop", ["--save", str(tmp_path / "plain.pt")])
    monkeypatch.setattr(watching, where, broken)
    record, said = watch("deepspeed_loop", ["--save", str(tmp_path / "watched.pt")], capsys)
    assert record.engines == []
    assert said.count("it broke") == 1
    assert "the script goes on" in said
    plain, seen = torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "watched.pt")
    assert all(torch.equal(plain[name], seen[name]) for name in plain)


@pytest.mark.parametrize("where", ["_before", "_after", "_keep", "passed_on"])
def test_a_failure_in_a_hook_is_one_message(
    where: str, one_rank: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the hooks call, rather than the hooks themselves, which hold the guard."""
    inner = {"_before": "copied", "_after": "leaves", "passed_on": "leaves"}
    if where in inner:
        monkeypatch.setattr(f"dsaccum.watch.recording.{inner[where]}", broken)
    else:
        monkeypatch.setattr(Recorder, where, broken)
    record, said = watch("deepspeed_loop", [], capsys)
    assert record.engines == []
    assert said.count("it broke") == 1


@pytest.mark.parametrize("where", ["LiveStorages.add", "LiveStorages.bytes", "collective_of"])
def test_a_failure_in_measuring_leaves_the_verdict(
    where: str, one_rank: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Communication and memory are not told then, and why; all else is. No mode stays on."""
    monkeypatch.setattr(f"dsaccum.watch.measuring.{where}", broken)
    record, said = watch("deepspeed_loop", [], capsys)
    [window] = record.engines[0].windows
    assert record.verdict == "equivalent"
    assert window.claims.which("untested") == ["communication", "memory"]
    assert "it broke" in window.reasons["memory"]
    assert "it broke" not in said
    assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_cannot_record_holds_up_nobody(tmp_path: Path) -> None:
    """The other rank is told, and neither waits; the same ranks are then watched in another run."""
    began = time.monotonic()
    cases = [["broken_rank", "--stage", "2"], ["deepspeed_loop", "--stage", "2"]]
    broken_run, right = on_ranks(2, cases, tmp_path)
    assert broken_run.engines == []
    assert any("another rank" in message for message in broken_run.messages)
    assert right.verdict == "equivalent"
    assert time.monotonic() - began < LONGEST_WAIT.total_seconds()


def test_a_window_that_never_comes_is_said(one_rank: object, capsys: pytest.CaptureFixture[str]) -> None:
    record, said = watch("deepspeed_loop", ["--updates", "2"], capsys)
    assert record.engines == []
    assert "window 3 was not reached: engine 1 made 2 optimizer steps" in said


def test_what_cannot_be_watched_is_refused_with_the_reason() -> None:
    class PipelineEngine:
        pass

    class DeepSpeedEngine:
        optimizer = None

    with pytest.raises(Refused, match="pipeline"):
        refuse_what_cannot_be_watched(PipelineEngine())
    with pytest.raises(Refused, match="no optimizer"):
        refuse_what_cannot_be_watched(DeepSpeedEngine())


def test_a_refused_engine_is_one_message_and_nothing_proven(
    one_rank: object, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nor is its optimizer then watched as if there were no engine."""
    words = ["--offload", "--stage", "2"]
    run_script("deepspeed_loop", [*words, "--save", str(tmp_path / "plain.pt")])
    record, said = watch("deepspeed_loop", [*words, "--save", str(tmp_path / "watched.pt")], capsys)
    assert record.engines == []
    assert said.count("dsaccum.watch: ") == 1
    assert "not watched: optimizer offload" in said
    assert record.unproven == record.messages
    plain, seen = torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "watched.pt")
    assert all(torch.equal(plain[name], seen[name]) for name in plain)


def hung_on(engine: Any) -> tuple[list[str], int]:
    """What covers the engine's own methods, and how many hooks its module and its parts have."""
    covered = [name for name in ("forward", "backward", "step", "_take_model_step") if name in engine.__dict__]
    hooks = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in engine.module.modules())
    return covered, hooks


@pytest.mark.parametrize("stage", ["0", "2"])
def test_nothing_stays_on_the_run_after_its_window(stage: str, one_rank: object) -> None:
    """Hence steps after it cost what they cost without. Before it, one function counts optimizer steps: the control."""
    words = ["--stage", stage]
    plain = hung_on(run_script("deepspeed_loop", words)["engine"])
    session = Session(report=lambda record: None)
    after = hung_on(run_script("deepspeed_loop", words)["engine"])
    assert session.record.verdict == "equivalent"
    session.end()
    assert after == plain
    session = Session((9,), report=lambda record: None)
    assert hung_on(run_script("deepspeed_loop", words)["engine"])[0] == ["_take_model_step"]
    session.end()


def test_nothing_stays_on_the_process(one_rank: object) -> None:
    import deepspeed

    before, clip = deepspeed.initialize, nn.utils.clip_grad_norm_
    session = Session(report=lambda record: None)
    assert deepspeed.initialize is not before
    session.end()
    assert deepspeed.initialize is before
    assert nn.utils.clip_grad_norm_.__name__ == clip.__name__
