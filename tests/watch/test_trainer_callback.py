"""The watch among Trainer's callbacks: it comes before the engine, ends with the training, and raises where asked to.

Run: pytest tests/watch/test_trainer_callback.py -n 0. Right and wrong runs are each other's control. Not covered: other
versions of transformers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsaccum.config.errors import ConfigError
from tests.watch.running import SCRIPTS, run_script

STAGES = ["-1", "0", pytest.param("3", marks=pytest.mark.slow)]


def verdict_of(names: dict[str, Any]) -> str | None:
    return names["callback"].session.verdict


@pytest.mark.parametrize("stage", STAGES)
def test_right_trainings_pass(one_rank: object, stage: str, tmp_path: Path) -> None:
    names = run_script("trainer_callback", ["--stage", stage, "--fail", "--html", str(tmp_path / "out.html")])
    assert verdict_of(names) == "equivalent"
    assert names["raised"] == ""
    [engine] = names["callback"].session.record.engines
    assert engine.framework == "Trainer"
    assert (engine.kind == "DeepSpeed") == (stage != "-1")
    assert "<h1>RIGHT" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize("stage", STAGES)
def test_a_bad_verdict_is_an_error_where_asked_for(one_rank: object, stage: str) -> None:
    names = run_script("trainer_callback", ["--stage", stage, "--mistake", "divided-twice", "--fail"])
    assert verdict_of(names) == "not_equivalent"
    assert "loss-scaled-twice (certain)" in names["raised"]
    assert "fix  " in names["raised"]


def test_a_bad_verdict_is_none_where_it_was_not(one_rank: object) -> None:
    names = run_script("trainer_callback", ["--mistake", "divided-twice"])
    assert verdict_of(names) == "not_equivalent"
    assert names["raised"] == ""


@pytest.mark.parametrize("stage", ["-1", "0"])
def test_a_callback_that_comes_too_late_says_so(one_rank: object, stage: str) -> None:
    with pytest.raises(ConfigError, match=r"came to Trainer after it was made; fix: Trainer\(\.\.\., callbacks="):
        run_script("trainer_callback", ["--stage", stage, "--late"])


@pytest.mark.slow
@pytest.mark.distributed
def test_every_rank_raises(tmp_path: Path) -> None:
    """Or the others would wait in their next collective for the one that has."""
    words = ["--stage", "1", "--mistake", "divided-twice", "--fail", "--let-it-raise"]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-m", *launcher, "--redirects", "3", str(SCRIPTS / "trainer_callback.py"), *words],
        capture_output=True, text=True, timeout=280, env={**os.environ, "PYTHONPATH": str(SCRIPTS.parents[2])},
    )  # fmt: skip
    assert ran.returncode == 1
    said = [path.read_text() for path in tmp_path.rglob("stderr.log")]
    assert len(said) == 2
    assert all("NotEquivalent: WRONG" in each for each in said), said
