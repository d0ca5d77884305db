"""Which run may be continued, and as which.

Run: pytest tests/endurance/test_start.py. No run begins here; test_resume.py and test_resplit.py have them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsaccum.config.errors import ConfigError
from dsaccum.training.continuing import _metrics_of_before
from dsaccum.training.identity import differences
from dsaccum.training.run_directory import RunDirectory
from dsaccum.training.start import Start, check_same_experiment, find_start

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


def test_steps_that_the_schedule_follows_are_named_by_their_flag() -> None:
    then, now = (changed("experiment.run.steps", steps) for steps in (10, 20))
    then["deepspeed"]["scheduler"], now["deepspeed"]["scheduler"] = (
        {"params": {"total_num_steps": steps}} for steps in (10, 20)
    )
    with pytest.raises(ConfigError, match=r"total_num_steps = 20 \(there: 10\); fix: --steps 10, which the schedule"):
        check_same_experiment(start_of(then), now, new_effective_batch=False)


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


def test_a_directory_that_takes_no_lock_is_named(tmp_path: Path) -> None:
    """As on a file system that is mounted read-only."""
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written to \(Is a directory.*fix: a run directory that you may"):
        RunDirectory(tmp_path).lock()


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(tmp_path: Path) -> None:
    done, killed = {"steps_done": 4}, {}
    with pytest.raises(ConfigError, match=r"has done 4 steps.*no checkpoint.*put .*checkpoints back"):
        _metrics_of_before(Start(RunDirectory(tmp_path), done), None)
    assert _metrics_of_before(Start(RunDirectory(tmp_path), killed), None) == ()
