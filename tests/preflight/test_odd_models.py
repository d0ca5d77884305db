"""What trains is not stopped because a verification has trouble with it; what would not accumulate is.

Run: pytest -n 0 tests/preflight/test_odd_models.py. Not covered: several ranks of which some raise (read, not run).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.runtime import engine as deepspeed_engine

from dsaccum.engine.process import Ranks
from dsaccum.training.inputs import Inputs
from dsaccum.training.preflight import NotEquivalent
from tests.preflight.asking import ask, inputs_of

MODELS = Path(__file__).with_name("odd_models.py")


def inputs_with(ranks: Ranks, model: str) -> Inputs:
    return inputs_of(ranks, "--set", "model={factory: " + f"{MODELS}:{model}" + "}")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("float32_inside", "not verified: RuntimeError: expected "),
        ("four_rows", "not verified: AssertionError: no two rows (at odd_models.py:"),
        ("drops", "no verdict: randomness-active, "),
        ("unused", "no verdict: absent-gradient-decayed, "),
    ],
)
def test_a_model_that_trains_is_not_stopped(one_rank: Ranks, model: str, why: str) -> None:
    said = ask(inputs_with(one_rank, model), one_rank)
    assert said.record["verdict"] is None
    assert said.lines[-1].startswith(f"preflight       {why}")
    assert said.lines[-1].endswith("; the run goes on")


def test_a_model_that_cannot_accumulate_is_stopped(one_rank: Ranks) -> None:
    """Control: with statistics over the batch no split equals another."""
    with pytest.raises(NotEquivalent, match="loss-not-additive"):
        ask(inputs_with(one_rank, "normalised"), one_rank)


def test_clipping_acts_in_the_copy(one_rank: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the run's own limit is above every norm."""
    inputs = inputs_of(one_rank)
    assert ask(inputs, one_rank).record["verdict"] == "equivalent"
    monkeypatch.setattr(deepspeed_engine.DeepSpeedEngine, "clip_fp32_gradients", lambda engine: None)
    with pytest.raises(NotEquivalent, match=r"wrong: .*clipping"):
        ask(inputs, one_rank)
