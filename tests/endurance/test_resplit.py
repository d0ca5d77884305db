"""A run that goes on with other ranks, accumulation steps and micro-batches of the same product is the same run.

Run: pytest -n 0 -m "slow or not slow" tests/endurance/test_resplit.py. E = 16; killed after the checkpoint of step 10
of 20, continued in every other way of splitting 16. The bound is that of every other comparison of splits: each sum is
rounded in another order, some 1e-7 a step, and 20 steps of AdamW carry it on; 1e-5 of the loss. Controls: a stream that
is entered one sample too late, and another effective batch, are both beyond it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.endurance.running import kill, metrics, move_in_stream, started, train, wait_until
from tests.training.launching import Ended

pytestmark = pytest.mark.distributed
STEPS, STOP, BOUND = 20, 10, 1e-5
LONG = ["--steps", str(STEPS), "--set", f"run.checkpoint_every={STOP}"]
SPLITS = [(1, 16, 1), (1, 8, 2), (1, 2, 8), (1, 1, 16), (2, 8, 1), (2, 4, 2), (2, 2, 4), (2, 1, 8)]
"""(W, N, B); the run begins with 1 x 4 x 4, and at ZeRO 1 with 2 x 4 x 2."""
IN_CI: set[tuple[int, tuple[int, int, int]]] = set()
"""None: two runs of two ranks take a minute; test_resume.py continues one there."""
Begun = Callable[[int], tuple[Path, Path]]


@pytest.fixture(scope="session")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """By ZeRO stage: the unbroken run, and one that was killed after its checkpoint of step 10."""
    known: dict[int, tuple[Path, Path]] = {}

    def of(stage: int) -> tuple[Path, Path]:
        if stage not in known:
            folder = tmp_path_factory.mktemp(f"stage{stage}")
            split, ranks = _split_flags(*_first_split(stage))
            whole, broken = folder / "whole", folder / "broken"
            assert train(whole, *LONG, *split, ranks=ranks, stage=stage).code == 0
            with started(broken, *LONG, *split, ranks=ranks, stage=stage) as process:
                assert wait_until((broken / f"checkpoints/step-{STOP}").exists, process)
                kill(process)
            known[stage] = whole, broken
        return known[stage]

    return of


@pytest.mark.parametrize(
    ("stage", "split"),
    [
        pytest.param(stage, split, marks=[] if (stage, split) in IN_CI else [pytest.mark.slow])
        for stage in (0, 1)
        for split in SPLITS
        if not (stage == 1 and split == (2, 4, 2))
    ],
)
def test_continued_in_another_split(
    begun: Begun,
    tmp_path: Path,
    stage: int,
    split: tuple[int, int, int],
    record_property: Callable[[str, object], None],
) -> None:
    whole, broken = begun(stage)
    ended, run = _continue(broken, tmp_path, stage, split)
    assert ended.code == 0, ended.said
    ranks, steps, rows = _first_split(stage)
    assert f"; before as {ranks} x {steps} x {rows}" in ended.said
    furthest = _furthest(whole, run)
    record_property("furthest", furthest)
    assert furthest < BOUND
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    for name in ("samples", "tokens", "learning_rate"):
        assert [line[name] for line in metrics(run)] == [line[name] for line in metrics(whole)]
    assert not list(run.rglob("universal")), "the conversion is removed"


@pytest.mark.slow
def test_a_stream_entered_one_sample_late_is_seen(begun: Begun, tmp_path: Path) -> None:
    whole, broken = begun(0)

    def enter_late(run: Path) -> None:
        move_in_stream(run / f"checkpoints/step-{STOP}", window=0, position=1)

    ended, run = _continue(broken, tmp_path, 0, (1, 8, 2), enter_late)
    assert ended.code == 0, ended.said
    assert _furthest(whole, run) > 100 * BOUND


@pytest.mark.slow
def test_another_effective_batch_is_refused_unless_it_is_meant(begun: Begun, tmp_path: Path) -> None:
    _, broken = begun(0)
    refused, _ = _continue(broken, tmp_path, 0, (1, 4, 8))
    assert refused.code == 2
    assert "its run has an effective batch of 16, this one 32" in refused.errors[0]
    assert "--new-effective-batch" in refused.errors[0]
    ended, run = _continue(broken, tmp_path, 0, (1, 4, 8), more=["--new-effective-batch"])
    assert ended.code == 0, ended.said
    assert [line["effective_batch"] for line in metrics(run)] == [16] * STOP + [32] * (STEPS - STOP)
    assert metrics(run)[-1]["samples"] == 16 * STOP + 32 * (STEPS - STOP)
    (entry,) = json.loads((run / "run.json").read_text())["continued"]
    assert (entry["step"], entry["effective_batch"]["total"]) == (STOP, 32)


def _first_split(stage: int) -> tuple[int, int, int]:
    return (2, 4, 2) if stage else (1, 4, 4)


def _split_flags(ranks: int, steps: int, rows: int) -> tuple[list[str], int | None]:
    return ["--accum-steps", str(steps), "--micro-batch", str(rows)], None if ranks == 1 else ranks


def _continue(
    broken: Path,
    folder: Path,
    stage: int,
    split: tuple[int, int, int],
    change: Callable[[Path], None] = lambda _: None,
    more: list[str] | None = None,
) -> tuple[Ended, Path]:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(broken, run)
    change(run)
    flags, ranks = _split_flags(*split)
    return train(run, *LONG, *flags, *(more or []), ranks=ranks, stage=stage), run


def _furthest(one: Path, other: Path) -> float:
    """Largest relative difference of a step's loss."""
    pairs = zip(metrics(one), metrics(other), strict=True)
    return max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs)
