"""Causes that are named for windows made of figures: several at once, and what the number of micro-batches tells.

Run: pytest tests/watch/test_causes_of_windows.py. Scripts that make such windows: test_frameworks.py,
test_deepspeed_loops.py, test_odd_scripts.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from dsaccum.verification.records.watch import WindowRecord
from tests.watch.made_windows import described_window, made_window

AVERAGED, APART = [[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]
ON_DDP = {"kind": "DDP"}
ON_DEEPSPEED = {"kind": "DeepSpeed", "zero_stage": 2}


def causes(window: WindowRecord) -> dict[str, str]:
    return {each.id: each.confidence for each in window.causes}


def made(steps: list[list[list[float]]]) -> list[list[list[float]]]:
    """By rank, of what each micro-step gave to both ranks."""
    return [[step[rank] for step in steps] for rank in range(2)]


def reduced_before_the_last(sizes: list[int]) -> WindowRecord:
    passing = made([AVERAGED] * 3 + [APART])
    return described_window(
        made_window([0.25] * 4, passing, ranks=2, facts=ON_DDP, rank={"expected_gradient_bytes": sizes})
    )


def test_a_right_window_has_no_cause() -> None:
    window = described_window(made_window([0.25] * 4))
    assert (window.verdict, window.causes) == ("equivalent", [])


def test_ranks_that_share_data_do_not_explain_wrong_weights() -> None:
    facts = {"kind": "DDP", "framework": "Accelerate", "accumulation_steps": 4}
    wrong = described_window(made_window([1 / 16] * 4, ranks=2, same_inputs=True, facts=facts))
    assert wrong.claims.which("fail") == ["weighting", "samples"]
    assert causes(wrong) == {"ranks-share-data": "certain", "loss-scaled-twice": "certain"}
    assert "accelerator.prepare" in wrong.causes[0].fix
    shared = described_window(made_window([1 / 4] * 4, ranks=2, same_inputs=True, facts=facts))
    assert causes(shared) == {"ranks-share-data": "certain"}
    odd = described_window(made_window([0.17, 0.05, 0.3, 0.11], ranks=2, same_inputs=True, facts=facts))
    assert causes(odd) == {"ranks-share-data": "certain", "unknown-difference": "ambiguous"}


@pytest.mark.parametrize("tokens", [True, False])
def test_an_engine_that_was_told_of_no_accumulation(tokens: bool) -> None:
    """Step is called after the 4th micro-batch: at ZeRO 2 the engine keeps the last gradient alone."""
    rank: dict[str, Any] = {"calls": [0] * 4, "step_calls": 1, **({} if tokens else {"tokens": [None] * 4})}
    only_last = made([[[0.0, 0.0]] * 2] * 3 + [AVERAGED])
    facts = {**ON_DEEPSPEED, "accumulation_steps": 1}
    window = described_window(made_window([0.25] * 4, only_last, ranks=2, facts=facts, rank=rank))
    assert causes(window) == {"boundary-shifted": "certain"}
    assert "of them only the last one reached the optimizer" in window.causes[0].summary
    assert "gradient_accumulation_steps is 1 in the config, or not there: set it to 4" in window.causes[0].fix
    assert "undivided loss" in window.causes[0].fix
    whole = described_window(made_window([0.25] * 4, ranks=2, facts=facts, rank=rank))
    assert "only the last" not in whole.causes[0].summary


def test_an_engine_that_was_told_of_fewer_is_stepped_at_every_micro_step() -> None:
    facts = {**ON_DEEPSPEED, "accumulation_steps": 2}
    window = described_window(made_window([0.25] * 4, facts=facts, rank={"calls": [0, 0, 1, 1], "step_calls": 2}))
    assert causes(window) == {"boundary-shifted": "certain"}
    assert "call backward and step once for each micro-batch" in window.causes[0].fix


def test_no_sync_on_the_last_micro_step_alone_is_told_from_a_late_step() -> None:
    inverted = reduced_before_the_last([384, 384, 384, 0])
    assert causes(inverted) == {"ranks-not-reduced": "certain"}
    assert "micro-steps 1 to 3, and not after the last, 4" in inverted.causes[0].summary
    assert "the condition of no_sync() is inverted" in inverted.causes[0].fix
    for late in ([0, 0, 384, 0], []):
        assert causes(reduced_before_the_last(late)) == {"boundary-shifted": "certain"}


def test_the_rest_of_an_epoch_in_the_next_window() -> None:
    leaked = described_window(made_window([0.25] * 6, facts={"earlier_windows": (4, 6, 4)}))
    assert causes(leaked) == {"stale-gradients": "certain"}
    assert "6 micro-batches, each divided by 4: the rest of an epoch" in leaked.causes[0].summary
    assert "clear the gradients before each epoch" in leaked.causes[0].fix
    right = described_window(made_window([1 / 6] * 6, facts={"earlier_windows": (4,)}))
    assert right.causes == []
    undivided = described_window(made_window([1.0] * 6, facts={"earlier_windows": (1, 6)}))
    assert causes(undivided) == {"loss-not-scaled": "certain"}
    summed = described_window(made_window([0.25] * 8, ranks=2, facts={**ON_DDP, "earlier_windows": (4,)}))
    assert causes(summed) == {"stale-gradients": "ambiguous", "ranks-summed": "ambiguous"}
