"""What a run writes stays whole when the disk does not take it.

Run: pytest tests/training/test_files.py. Not covered: a real full disk.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsaccum.batch import EffectiveBatch
from dsaccum.training.console import ConsoleProgress
from dsaccum.training.finish import next_command, save_model
from dsaccum.training.journal import Journal
from dsaccum.training.metrics import MetricsFile, StepMetrics
from dsaccum.training.run_directory import RunDirectory


def step(number: int, loss: float | None = 1.0) -> StepMetrics:
    return StepMetrics(number, 16 * number, 100 * number, loss, 1e-3, 1.0, 0.1, loss is not None, 16)


class FullDisk:
    """A file on a disk that takes half of the next line."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, line: bytes) -> int:
        return self._file.write(line[: len(line) // 2])


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write(step(1))
    metrics._file = FullDisk(metrics._file)
    with pytest.raises(OSError, match="No space left"):
        metrics.write(step(2))
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1]


def test_metrics_hold_no_nan(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write(step(1, loss=float("nan")))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None


def journal(folder: Path) -> Journal:
    console = ConsoleProgress(10, is_first=False)
    return Journal(RunDirectory(folder), {"name": "x"}, console, lambda events: None, is_first=True)


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_the_first_reason_of_a_failure_is_kept(tmp_path: Path) -> None:
    run = journal(tmp_path)
    assert status(tmp_path)["status"] == "running"
    run.fail("the cause")
    run.fail("a symptom")
    assert (status(tmp_path)["status"], status(tmp_path)["reason"]) == ("failed", "the cause")


def test_a_finished_run_is_not_turned_into_a_failed_one(tmp_path: Path) -> None:
    run = journal(tmp_path)
    run.end("finished", steps_done=3)
    run.fail("too late")
    assert (status(tmp_path)["status"], status(tmp_path)["steps_done"]) == ("finished", 3)


def test_telling_of_a_failure_never_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = journal(folder)
    (folder / "run.json").unlink()
    (folder / "metrics.jsonl").unlink()
    folder.rmdir()
    run.fail("the cause")
    assert "could not be told that the run failed" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [True, False])
def test_a_model_is_saved_whole_or_not_at_all(tmp_path: Path, fails: bool) -> None:
    class SomeTokenizer:
        def save(self, directory: Path) -> None:
            if fails:
                raise OSError("No space left on device")

    module = torch.nn.Linear(2, 2)
    with pytest.raises(OSError, match="No space left") if fails else contextlib.nullcontext():
        save_model(module, dict(module.state_dict()), SomeTokenizer(), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ([] if fails else ["model"])


def test_a_model_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """Of the same run, continued past its end; and what a run that was killed while it saved has left goes."""

    class SomeTokenizer:
        def save(self, directory: Path) -> None:
            (directory / "tokenizer.json").touch()

    for name in ("model", "model.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").touch()
    module = torch.nn.Linear(2, 2)
    save_model(module, dict(module.state_dict()), SomeTokenizer(), tmp_path / "model")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(
    ("command", "batch", "expected"),
    [
        (
            ["--deepspeed", "a.json", "--experiment", "my text.yaml", "--accum-steps", "4", "--output-dir=o"],
            EffectiveBatch(1, 4, 4),
            "deepspeed launch/train.py --deepspeed a.json --experiment 'my text.yaml' --accum-steps 8 --micro-batch 2",
        ),
        (
            ["--local_rank=0", "--deepspeed", "a.json", "--micro-batch", "2"],
            EffectiveBatch(2, 4, 2),
            "deepspeed --num_gpus 2 launch/train.py --deepspeed a.json --accum-steps 8 --micro-batch 1",
        ),
        (
            ["--deepspeed", "a.json"],
            EffectiveBatch(1, 16, 1),
            "deepspeed launch/train.py --deepspeed a.json --experiment launch/experiments/llama-nano.yaml",
        ),
    ],
)
def test_next_command_is_the_same_run_split_finer(command: list[str], batch: EffectiveBatch, expected: str) -> None:
    assert next_command(command, batch) == expected
