"""Checkpoints as files: whole or not there, checked before they are used, and read without running anything.

Run: pytest tests/endurance/test_checkpoint_files.py. No engine and no ranks; test_resume.py and test_faults.py have
them. Not covered: power failures, and file systems that lie about fsync.
"""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsaccum.data.order import WindowOrder
from dsaccum.durable import Written, write_durably
from dsaccum.engine.state_files import StateFiles, only_known_classes
from dsaccum.training.checkpoints.manifest import Counters, Manifest, Split
from dsaccum.training.checkpoints.random_state import random_state, restore_random_state
from dsaccum.training.checkpoints.shelf import Checkpoint, Damaged, Shelf
from dsaccum.training.metrics import MetricsFile, StepMetrics, read_metrics


def manifest(step: int, files: dict[str, Written] | None = None) -> Manifest:
    return Manifest(
        counters=Counters(step=step), split=Split(world_size=1, accumulation_steps=4, micro_batch=4), zero_stage=0,
        metrics_bytes=0, versions={}, files=files or {},
    )  # fmt: skip


def publish(shelf: Shelf, step: int, keep: int = 10) -> None:
    draft = shelf.draft(step)
    written = write_durably(draft / "state.bin", bytes([step]) * 100)
    write_durably(draft / "checkpoint.json", manifest(step, {"state.bin": written}).as_bytes())
    shelf.publish(draft, keep)


def steps_on(shelf: Shelf) -> list[int]:
    return [each.step for each in shelf.newest_first() if isinstance(each, Checkpoint)]


def test_a_draft_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "checkpoints")
    publish(shelf, 5)
    draft = shelf.draft(10)
    write_durably(draft / "checkpoint.json", manifest(10).as_bytes())
    assert steps_on(shelf) == [5]
    publish(shelf, 15)
    assert not draft.exists()
    assert steps_on(shelf) == [15, 5]


def test_a_directory_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Shelf(tmp_path / "run" / "checkpoints").draft(5)


def test_without_its_manifest_or_under_another_name_it_is_damaged(tmp_path: Path) -> None:
    """None is passed over in silence: with the last of them, the whole run would be."""
    shelf = Shelf(tmp_path)
    for step in (5, 10, 15, 20, 25, 30):
        publish(shelf, step)
    (tmp_path / "step-15/checkpoint.json").write_text('{"schema": "dsaccum.checkpoint/1", "cou')
    (tmp_path / "step-10").rename(tmp_path / "step-11")
    (tmp_path / "step-20/checkpoint.json").unlink()
    edited = tmp_path / "step-25/checkpoint.json"
    edited.write_text(edited.read_text().replace('"micro_batch": 4', '"micro_batch": 8'))
    (tmp_path / "step-30/checkpoint.json").write_bytes(b"\xff")
    (tmp_path / "notes").mkdir()
    assert steps_on(shelf) == [5]
    damaged = {each.path.name: each.reason for each in shelf.newest_first() if isinstance(each, Damaged)}
    assert list(damaged) == ["step-30", "step-25", "step-20", "step-15", "step-11"]
    assert damaged["step-25"] == "checkpoint.json: other values than were written"
    assert damaged["step-20"] == "checkpoint.json: No such file or directory"
    assert damaged["step-11"] == "checkpoint.json: of step 10"


def test_what_is_newer_than_the_one_saved_goes(tmp_path: Path) -> None:
    """A damaged one must not take the place of the one that was just written."""
    shelf = Shelf(tmp_path)
    for step in (5, 10, 15):
        publish(shelf, step)
    (tmp_path / "step-10/checkpoint.json").unlink()
    publish(shelf, 6, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-6"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for step in (5, 10, 15, 20):
        publish(shelf, step, keep=2)
    assert steps_on(shelf) == [20, 15]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-15", "step-20"]


def test_a_step_that_is_saved_again_replaces_the_one_before(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    publish(shelf, 5)
    (tmp_path / "step-5/state.bin").write_bytes(b"")
    publish(shelf, 5)
    assert (tmp_path / "step-5/state.bin").read_bytes() == bytes([5]) * 100


def test_a_full_disk_is_noted_and_nothing_more_is_written(tmp_path: Path) -> None:
    files = StateFiles()
    files.save({"x": 1}, tmp_path / "missing" / "a.pt")
    files.save({"x": 1}, tmp_path / "b.pt")
    assert isinstance(files.error, OSError)
    assert not (tmp_path / "b.pt").exists()


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import pathlib; pathlib.Path('it-ran').touch()",))


def test_nothing_is_run_by_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": _Runs()}, "evil.pt")
    with only_known_classes(), pytest.raises(pickle.UnpicklingError):
        torch.load("evil.pt", weights_only=False)
    assert not Path("it-ran").exists()
    torch.load("evil.pt", weights_only=False)
    assert Path("it-ran").exists(), "control: it would have"


def test_generators_go_on() -> None:
    state = random_state()
    first = torch.rand(3).tolist(), random.random(), np.random.rand()
    restore_random_state(state)
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == first
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) != first


def step(number: int) -> StepMetrics:
    return StepMetrics(number, number, number, 1.0, 0.1, 1.0, 0.5, applied=True, effective_batch=16)


def test_metrics_past_the_checkpoint_are_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(step(1))
    length = file.make_durable()
    file.write(step(2))
    file.close()
    with path.open("ab") as torn:
        torn.write(b'{"step": 3, "sam')
    assert [each.step for each in read_metrics(path, length)] == [1]
    again = MetricsFile(path, length)
    again.write(step(2))
    again.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    with pytest.raises(OSError, match="the checkpoint was made with"):
        read_metrics(path, 10_000)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b'"loss": 1.0', b'"loss": "1"', "line 2 is not one that a run writes"),
        (b'"step": 2', b'"step": 7', "line 2 is of step 7"),
        (b'{"step": 2', b'["step": 2', "line 2 is not one that a run writes"),
    ],
)
def test_metrics_that_were_edited_are_not_gone_on_with(tmp_path: Path, old: bytes, new: bytes, problem: str) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for number in (1, 2):
        file.write(step(number))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(old, new))
    with pytest.raises(ValueError, match=problem):
        read_metrics(path, file.make_durable())
    file.close()


@pytest.mark.parametrize("last_window", ["continue", "drop", "short"])
@pytest.mark.parametrize("change", range(9))
def test_another_effective_batch_goes_on_in_the_stream(last_window: Any, change: int) -> None:
    """No sample of an epoch is seen twice, and none is left out but what the epoch's end leaves out."""
    samples, before = 23, 4
    first = WindowOrder(samples, before, last_window, seed=1)
    then = WindowOrder(samples, 3, last_window, seed=1, first_window=change, position=first.position_of(change))
    seen = np.concatenate(
        [
            *[first.sample_ids(window) for window in range(change)],
            *[then.sample_ids(window) for window in range(change, change + 20)],
        ]
    )
    if last_window == "continue":
        stream = np.concatenate([first._epoch(epoch) for epoch in range(5)])
        assert seen.tolist() == stream[: len(seen)].tolist()
        return
    orders = [(first, window) for window in range(change)] + [(then, window) for window in range(change, change + 20)]
    begins = [order.position_of(window) for order, window in orders]
    for (order, window), begin, following in zip(orders, begins, [*begins[1:], None], strict=True):
        epoch, offset = divmod(begin, samples)
        due = first._epoch(epoch)[offset : offset + order.effective_batch].tolist()
        assert [sample for sample in order.sample_ids(window).tolist() if sample >= 0] == due
        if following is not None and following != begin + order.effective_batch:
            assert following == (epoch + 1) * samples, "only an epoch's end leaves samples out"
            left_out = following - begin - order.effective_batch
            assert left_out <= 0 if last_window == "short" else 0 < left_out < before
