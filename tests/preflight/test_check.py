"""What is verified before a run, when it is verified again, and what is no reason not to train: in one process.

Run: pytest -n 0 tests/preflight/test_check.py. Not covered: the command itself (test_run.py).
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from dsaccum.engine.process import Ranks
from dsaccum.preflight import kept, small_run
from dsaccum.training.inputs import Inputs
from dsaccum.training.outcome import RunFailed
from dsaccum.training.preflight import NotEquivalent
from dsaccum.training.run import _stop_if_asked
from dsaccum.training.stop_request import StopRequest
from dsaccum.user_cache import cached_file
from dsaccum.verification.records.record import VerifyRecord
from tests.preflight.asking import ask, inputs_of


@pytest.fixture(scope="module")
def read(one_rank: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Verified once already: what that imports is part of the fingerprint from then on, and a run starts without it."""
    inputs = inputs_of(one_rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        ask(inputs, one_rank)
    return inputs


def test_a_verdict_is_kept_until_something_changes(read: Inputs, one_rank: Ranks, cache: Path) -> None:
    first, again = ask(read, one_rank), ask(read, one_rank)
    assert "equivalent: 4 micro-batches of 2 on 1 rank" in first.lines[-1]
    assert first.moves > 20, "a watchdog sees that it is at work"
    assert again.lines == [f"preflight       equivalent, as verified on {again.record['verified_on']} for this config, "
                           "model and code"]  # fmt: skip
    assert first.record["fingerprint"] == again.record["fingerprint"]
    other = ask(inputs_of(one_rank, "--accum-steps", "3"), one_rank)
    assert "equivalent: 3 micro-batches" in other.lines[-1]
    assert len(list(cache.iterdir())) == 2


def test_random_generators_and_the_model_are_as_before(read: Inputs, one_rank: Ranks) -> None:
    before = {name: value.clone() for name, value in read.model.state_dict().items()}
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    due = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    ask(read, one_rank)
    assert (torch.rand(1), random.random(), np.random.rand()) == due
    assert all(torch.equal(value, before[name]) for name, value in read.model.state_dict().items())


@pytest.mark.parametrize(
    ("ranks", "steps", "rows", "verified"),
    [
        (1, 512, 8, (4, 2)),
        (2, 4, 1, (4, 1)),
        (4, 8, 2, (3, 2)),
        (3, 3, 2, (2, 2)),
        (2, 2, 2, (2, 2)),
        (1, 1, 16, (1, 2)),
    ],
)
def test_a_large_window_is_made_small(
    one_rank: Ranks, ranks: int, steps: int, rows: int, verified: tuple[int, int]
) -> None:
    several = Ranks(0, ranks, 0, ranks, launched=False)
    given = inputs_of(several, "--accum-steps", str(steps), "--micro-batch", str(rows))
    batch = small_run._stepping(given).settings.batch
    assert (batch.accumulation_steps, batch.micro_batch, batch.world_size) == (*verified, ranks)


def test_a_fault_stops_it_and_is_not_kept(
    read: Inputs, one_rank: Ranks, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    original = DeepSpeedEngine.backward
    assert ask(read, one_rank).record["verdict"] == "equivalent"
    with monkeypatch.context() as patch:
        patch.setattr(DeepSpeedEngine, "backward", lambda self, loss, **given: original(self, loss / 4, **given))
        for _ in range(2):
            with pytest.raises(NotEquivalent, match=r"loss-scaled-twice \(certain\)"):
                ask(read, one_rank)
    assert len(list(cache.iterdir())) == 1
    assert "as verified on" in ask(read, one_rank).lines[-1]


def test_a_cache_that_cannot_be_written_is_no_reason_not_to_train(
    read: Inputs, one_rank: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert "it could not be kept in " in ask(read, one_rank).lines[-1]


def test_a_kept_file_that_is_broken_is_made_anew(read: Inputs, one_rank: Ranks, cache: Path) -> None:
    ask(read, one_rank)
    [path] = cache.iterdir()
    path.write_text("{")
    assert "equivalent: " in ask(read, one_rank).lines[-1]
    assert VerifyRecord.read(path).verdict == "equivalent"


def test_a_pipe_among_the_kept_files_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would never answer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cached_file("preflight", "0" * 32)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert kept.find("0" * 32) is None


def test_who_asks_for_a_stop_meanwhile_gets_it(read: Inputs, one_rank: Ranks) -> None:
    stop = StopRequest()
    _stop_if_asked(read, one_rank, stop, None, [])
    stop.ask("SIGTERM")
    with pytest.raises(RunFailed, match="stopped by SIGTERM before the first step; nothing was trained"):
        _stop_if_asked(read, one_rank, stop, None, [])


def test_only_an_equivalent_record_counts(read: Inputs, one_rank: Ranks, cache: Path) -> None:
    key = ask(read, one_rank).record["fingerprint"]
    path = cache / f"{key}.json"
    altered = json.loads(path.read_text())
    altered["claims"]["update"], altered["verdict"] = "untested", None
    path.write_text(json.dumps(altered))
    assert kept.find(key) is None


def test_a_model_that_cannot_be_verified_in_seconds_trains(
    read: Inputs, one_rank: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_run, "LONGEST_S", 1e-9)
    said = ask(read, one_rank)
    assert said.record["verdict"] is None
    assert said.lines[-1].endswith("in seconds: dsaccum verify does it; the run goes on")
