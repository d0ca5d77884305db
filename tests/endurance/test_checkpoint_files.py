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

from dsaccum.config.errors import ConfigError
from dsaccum.data.order import WindowOrder
from dsaccum.durable import Written, write_durably
from dsaccum.engine.state_files import StateFiles, only_known_classes
from dsaccum.training.checkpoints.manifest import Counters, Manifest, Split
from dsaccum.training.checkpoints.random_state import random_state, restore_random_state
from dsaccum.training.checkpoints.shelf import Shelf
from dsaccum.training.identity import differences
from dsaccum.training.metrics import MetricsFile, StepMetrics, read_metrics
from dsaccum.training.run_directory import RunDirectory
from dsaccum.training.start import Start, check_same_experiment, find_start


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
    return [each.step for each in shelf.newest_first()]


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


def test_without_its_manifest_or_under_another_name_it_is_none(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for step in (5, 10, 15):
        publish(shelf, step)
    (tmp_path / "step-15/checkpoint.json").write_text('{"schema": "dsaccum.checkpoint/1", "cou')
    (tmp_path / "step-10").rename(tmp_path / "step-11")
    (tmp_path / "notes").mkdir()
    assert steps_on(shelf) == [5]


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


RECORD: dict[str, Any] = {
    "schema": "dsaccum.train/1", "name": "x", "status": "running", "steps_done": 4,
    "experiment": {
        "model": {"architecture": "gpt2", "config": {"n_layer": 2}}, "loss": {"factory": None},
        "data": {"sequence_length": 32, "files": ["a.txt"], "seed": 0}, "run": {"seed": 0, "steps": 10},
    },
    "deepspeed": {
        "train_batch_size": 16, "optimizer": {"params": {"lr": 0.1}}, "zero_optimization": {"stage": 1, "bucket": 1},
        "steps_per_print": 10,
    },
    "data": {"sha256": "abc"}, "effective_batch": {"total": 16},
}  # fmt: skip


def changed(path: str, value: Any) -> dict[str, Any]:
    record = json.loads(json.dumps(RECORD))
    *parents, last = path.split(".")
    target = record
    for name in parents:
        target = target[name]
    target[last] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("experiment.model.config.n_layer", 3, "model.config.n_layer"),
        ("experiment.data.sequence_length", 64, "data.sequence_length"),
        ("experiment.data.seed", 1, "data.seed"),
        ("experiment.run.seed", 1, "run.seed"),
        ("deepspeed.optimizer.params.lr", 0.2, "optimizer.params.lr"),
        ("deepspeed.zero_optimization.stage", 2, "zero_optimization.stage"),
        ("data.sha256", "def", "data's content (sha256)"),
        ("deepspeed.bf16", {"enabled": True}, "bf16.enabled"),
    ],
)
def test_what_decides_a_trajectory_is_compared(path: str, value: Any, named: str) -> None:
    assert [name for name, *_ in differences(RECORD, changed(path, value))] == [named]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("experiment.data.files", ["b.txt"]), ("experiment.run.steps", 20), ("deepspeed.train_batch_size", 32),
        ("deepspeed.steps_per_print", 1), ("deepspeed.zero_optimization.bucket", 2), ("status", "failed"),
    ],
)  # fmt: skip
def test_what_does_not_is_free(path: str, value: Any) -> None:
    assert differences(RECORD, changed(path, value)) == []


def start_of(record: dict[str, Any]) -> Start:
    return Start(RunDirectory(Path("runs/x")), record)


def test_a_finished_run_wants_more_steps() -> None:
    finished = {**changed("status", "finished"), "steps_done": 10}
    with pytest.raises(ConfigError, match=r"holds a finished run of 10 steps.*more --steps"):
        check_same_experiment(start_of(finished), RECORD, new_effective_batch=False)
    check_same_experiment(start_of(finished), changed("experiment.run.steps", 20), new_effective_batch=False)


def test_another_experiment_is_named() -> None:
    other = changed("deepspeed.optimizer.params.lr", 0.2)
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr = 0\.2 \(there: 0\.1\)"):
        check_same_experiment(start_of(RECORD), other, new_effective_batch=True)


def test_where_a_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    assert find_start("auto", None) == find_start("auto", "run") == find_start("never", "run") == Start()
    run.mkdir()
    (run / "run.json").write_text(json.dumps(RECORD))
    assert find_start("auto", "run").directory == find_start("run", None).directory == RunDirectory(run)
    for resume, output, problem in (
        ("never", "run", "it holds a run already"),
        ("missing", None, "holds no run"),
        ("run", "other", "another directory than --output-dir"),
    ):
        with pytest.raises(ConfigError, match=problem):
            find_start(resume, output)
    (run / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        find_start("auto", "run")


def test_one_run_at_a_time(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with directory.lock():
        assert not directory.is_free()
        with pytest.raises(ConfigError, match="another run is at work in it"):
            directory.lock()
    assert directory.is_free()


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
