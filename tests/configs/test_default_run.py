"""The README's first command, whole, and the same effective batch in every shipped split: figures, not only success.

Run: pytest -m slow tests/configs/test_default_run.py -n 0 -s (about 15 minutes on 2 cores).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.training.launching import REPOSITORY, environment_of_a_user, run_train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
CONFIGS = REPOSITORY / "ds_configs"


def losses(folder: Path, run: str) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]


def test_default_run_learns_python(tmp_path: Path) -> None:
    ended = run_train(cwd=tmp_path, ranks=1, env=environment_of_a_user())
    print(ended.stdout)
    assert ended.code == 0, ended.said
    assert ended.seconds <= 180
    record = json.loads((tmp_path / "runs/stdlib-nano-1/run.json").read_text())
    assert 5.5 < record["first_loss"] < 6.5
    assert record["last_loss"] < 2.5
    assert abs(record["held_out_loss"] - record["last_loss"]) < 0.2
    sample = ended.stdout.split("-" * 80)[1].split("|>")[1]
    assert re.search(r"\n {4}", sample), "indentation"
    assert re.search(r"\b(self|def|return|if|for|in|class|import|else|None|not|is)\b", sample), "keywords"


@pytest.mark.parametrize("experiment", ["stdlib-nano", "stdlib-functions"])
def test_every_split_of_e_16_gives_the_same_losses(tmp_path: Path, experiment: str) -> None:
    """20 steps; relative difference at most 1e-5 in fp32 (tests/training/test_splits_agree.py derives the bound)."""
    runs = {
        "accum1": (1, "accum1", []),
        "accum4": (1, "accum4", []),
        "accum16": (1, "accum16", []),
        "2 ranks, accum4": (2, "accum4", ["--micro-batch", "2"]),
        "2 ranks, accum1": (2, "accum1", ["--micro-batch", "8"]),
        "zero1": (1, "zero1_accum4", []),
        "zero2": (1, "zero2_accum4", []),
        "zero3": (1, "zero3_accum4", []),
        "2 ranks, zero1": (2, "zero1_accum4", ["--micro-batch", "2"]),
        "2 ranks, zero2": (2, "zero2_accum4", ["--micro-batch", "2"]),
        "2 ranks, zero3": (2, "zero3_accum4", ["--micro-batch", "2"]),
    }
    found = {}
    for number, (name, (ranks, config, flags)) in enumerate(runs.items(), start=1):
        ended = run_train(
            "--experiment", str(REPOSITORY / f"launch/experiments/{experiment}.yaml"), "--steps", "20", *flags,
            cwd=tmp_path, ranks=ranks, deepspeed=CONFIGS / f"{config}.json", env=environment_of_a_user(),
        )  # fmt: skip
        assert ended.code == 0, ended.said
        found[name] = losses(tmp_path, f"{experiment}-{number}")
    for name, values in found.items():
        furthest = max(abs(a - b) / b for a, b in zip(values, found["accum1"], strict=True))
        print(f"{experiment}: {name}: largest relative difference to accum1 {furthest:.2e}")
        assert furthest < 1e-5, name
