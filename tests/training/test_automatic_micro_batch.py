"""``"train_micro_batch_size_per_gpu": "auto"`` as a user meets it: memory that runs out, and later starts.

Run: pytest -n 0 -m "slow or not slow" tests/training/test_automatic_micro_batch.py. Each rank holds 4 rows: B = 8,
which the plan finds to fit, fails in the first window; and the second rank lacks memory once more, in micro-step 2 of
window 3. Not covered: a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.endurance.running import metrics
from tests.training.launching import REPOSITORY, Ended, environment, run_train

STEPS, TOTAL = 6, 16
MODEL = f"model={{factory: '{REPOSITORY}/tests/training/scarce.py:limited_model'}}"
FLAGS = ["--set", MODEL, "--set", "data.sequence_length=32", "--steps", str(STEPS)]


def _config(folder: Path, stage: int = 0, **batch: object) -> Path:
    content = {
        "train_batch_size": TOTAL,
        "train_micro_batch_size_per_gpu": "auto",
        **batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    path = folder / f"auto{stage}.json"
    path.write_text(json.dumps(content))
    return path


def _train(
    folder: Path,
    *flags: str,
    ranks: int | None = 2,
    stage: int = 0,
    rows: int = 4,
    evaluated_rows: int = 8,
    call: int = 0,
    where: str = "",
) -> Ended:
    scarce = {
        "SCARCE_ROWS": str(rows),
        "SCARCE_EVALUATED_ROWS": str(evaluated_rows),
        "SCARCE_CALL": str(call),
        "SCARCE_WHERE": where,
    }
    env = environment(XDG_CACHE_HOME=str(folder / "cache"), PYTHONPATH=str(REPOSITORY), **scarce)
    return run_train(*FLAGS, *flags, cwd=folder, ranks=ranks, deepspeed=_config(folder, stage), env=env)


def _record(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


@pytest.mark.slow  # test_out_of_memory.py has two ranks in CI
@pytest.mark.distributed
@pytest.mark.parametrize("where", ["forward", "mid-backward"])
def test_halved_twice_and_remembered(tmp_path: Path, where: str) -> None:
    ended = _train(tmp_path, "--output-dir", "run", call=6, where=where)
    assert ended.code == 0, ended.said
    assert "micro-batch     auto: B = 8, N = 1 (planned: " in ended.said
    assert "micro-batch     B = 4, N = 2 from step 1 on, before 8 and 1: rank 0 ran out of memory" in ended.said
    assert "micro-batch     B = 2, N = 4 from step 3 on, before 4 and 2: rank 1 ran out of memory" in ended.said
    record = _record(tmp_path / "run")
    assert record["effective_batch"] == {
        "world_size": 2,
        "micro_batch": 2,
        "accumulation_steps": 4,
        "total": TOTAL,
    }
    assert [(each["step"], each["micro_batch"]) for each in record["split_anew"]] == [(1, 4), (3, 2)]

    fixed = _train(tmp_path, "--output-dir", "fixed", "--accum-steps", "4")
    assert fixed.code == 0, fixed.said
    ours, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "fixed")
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-5)
    for name in ("step", "samples", "tokens", "applied"):
        assert [line[name] for line in ours] == [line[name] for line in theirs]

    again = _train(tmp_path, "--output-dir", "again")
    assert again.code == 0, again.said
    assert "micro-batch     auto: B = 2, N = 4 (more did not fit before: " in again.said
    assert "ran out of memory" not in again.said


def test_with_one_row_there_is_nothing_to_halve(tmp_path: Path) -> None:
    """From 16 rows down to 1, and not even that fits: one line, exit code 3. Stand-ins make 1 + 2 + 4 + 8 calls."""
    ended = _train(tmp_path, "--output-dir", "run", ranks=None, rows=1, call=16, where="forward")
    assert ended.code == 3, ended.said
    assert ended.said.count("ran out of memory") == 5, "4 halvings and the end"
    assert "error: rank 0 ran out of memory in step 1 with micro-batches of 1 sample" in ended.errors[-1]
    assert "dsaccum plan" in ended.errors[-1]
    assert _record(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
def test_at_zero_3_the_next_start_goes_on(tmp_path: Path) -> None:
    first = _train(tmp_path, "--output-dir", "run", ranks=None, stage=3, rows=8)
    assert first.code == 3, first.said
    assert "B = 8 is remembered: the same command goes on with it" in first.errors[-1]
    second = _train(tmp_path, "--output-dir", "run", ranks=None, stage=3, rows=8)
    assert second.code == 0, second.said
    assert "auto: B = 8, N = 2" in second.said
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_continued_as_it_was(tmp_path: Path) -> None:
    ended = _train(tmp_path, "--output-dir", "run", ranks=None, rows=4)
    assert ended.code == 0, ended.said
    went_on = _train(tmp_path, "--output-dir", "run", "--steps", str(STEPS + 2), ranks=None, rows=4)
    assert went_on.code == 0, went_on.said
    assert "auto: B = 4, N = 4 (as before)" in went_on.said
    assert [(each["step"], each["micro_batch"]) for each in _record(tmp_path / "run")["split_anew"]] == [(1, 8), (1, 4)]
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 3))


def test_without_auto_the_fix_is_named(tmp_path: Path) -> None:
    ended = _train(tmp_path, "--output-dir", "run", "--micro-batch", "16", ranks=None, rows=4)
    assert ended.code == 3, ended.said
    assert '"train_micro_batch_size_per_gpu": "auto"' in ended.errors[-1]
    assert "--micro-batch" in ended.errors[-1]


@pytest.mark.slow
def test_where_evaluation_lacks_memory_the_next_start_goes_on(tmp_path: Path) -> None:
    flags = ["--output-dir", "run", "--set", "run.eval_every=2", "--set", "run.checkpoint_every=1"]
    first = _train(tmp_path, *flags, ranks=None, rows=4, evaluated_rows=2)
    assert first.code == 3, first.said
    assert "ran out of memory in evaluation of step 2" in first.errors[-1]
    assert "B = 2 is remembered: the same command goes on with it" in first.errors[-1]
    second = _train(tmp_path, *flags, ranks=None, rows=4, evaluated_rows=2)
    assert second.code == 0, second.said
    assert "auto: B = 2, N = 8" in second.said
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
