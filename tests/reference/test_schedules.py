"""Closed formulas of the schedules against DeepSpeed's own classes. Run: pytest tests/reference/test_schedules.py

The classes are stepped as the engine does it: made before update 1, stepped after every update.
Not covered here: torch's own schedulers and per-group lists, which are not rebuilt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsaccum.reference_optimizers import NotRebuilt, Optimizer, StepSettings, rebuild_optimizer
from dsaccum.reference_schedules import Schedule, rebuild_schedule

ADAM = {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.85, 0.95]}}
SGD = {"type": "SGD", "params": {"lr": 0.02}}


def ours(block: dict[str, Any] | None, optimizer: dict[str, Any]) -> Schedule:
    rebuilt = rebuild_optimizer(optimizer)
    assert isinstance(rebuilt, Optimizer)
    schedule = rebuild_schedule(block, rebuilt)
    assert not isinstance(schedule, NotRebuilt), schedule
    return schedule


def theirs(block: dict[str, Any], optimizer: dict[str, Any], updates: int) -> list[StepSettings]:
    kind, params = (torch.optim.SGD if optimizer["type"] == "SGD" else torch.optim.AdamW), dict(optimizer["params"])
    inner = kind([nn.Parameter(torch.zeros(1))], **params)
    scheduler = getattr(lr_schedules, block["type"])(inner, **block["params"])
    used = []
    for _ in range(updates):
        group = inner.param_groups[0]
        used.append(StepSettings(group["lr"], tuple(group["betas"]) if "betas" in group else None))
        scheduler.step()
    return used


def assert_same(block: dict[str, Any], optimizer: dict[str, Any], updates: int) -> None:
    """To 1e-12 relative: DeepSpeed finds the place in a cycle of up to 400 by subtracting from 1 + done / 400.

    That loses 400 x 1.5 epsilons = 1.3e-13. The rest is a handful of roundings. What comes out as the difference of
    two larger numbers (a cosine's end, a rate near 0) has that error of the largest rate.
    """
    schedule, wanted = ours(block, optimizer), theirs(block, optimizer, updates)
    largest = max(settings.learning_rate for settings in wanted)
    for update, their in enumerate(wanted, start=1):
        our = schedule(update)
        place = f"{block}, update {update}"
        assert math.isclose(our.learning_rate, their.learning_rate, rel_tol=1e-12, abs_tol=1.3e-13 * largest), place
        assert (our.betas is None) == (their.betas is None), place
        if our.betas is not None and their.betas is not None:
            assert math.isclose(our.betas[0], their.betas[0], rel_tol=1e-12), place
            assert our.betas[1] == their.betas[1], place


def differs(
    right: dict[str, Any], wrong: Callable[[int], StepSettings], optimizer: dict[str, Any], updates: int
) -> bool:
    return any(
        not math.isclose(wrong(update).learning_rate, their.learning_rate, rel_tol=1e-6, abs_tol=1e-12)
        for update, their in enumerate(theirs(right, optimizer, updates), start=1)
    )


rate = st.floats(0, 0.1)
steps = st.integers(1, 40)
kind = st.sampled_from(["log", "linear", "unheard-of"])
warmup = {"warmup_type": kind}


def some(required: dict[str, Any], optional: dict[str, Any]) -> Any:
    return st.fixed_dictionaries(required, optional=optional)


parameters = {
    "WarmupLR": some({"warmup_num_steps": steps}, {**warmup, "warmup_min_lr": rate, "warmup_max_lr": rate}),
    "WarmupDecayLR": some(
        {"total_num_steps": steps, "warmup_num_steps": steps},
        {**warmup, "warmup_min_lr": rate, "warmup_max_lr": rate},
    ),
    "WarmupCosineLR": some(
        {"total_num_steps": steps, "warmup_num_steps": steps},
        {**warmup, "warmup_min_ratio": st.floats(0, 1), "cos_min_ratio": st.floats(0, 1)},
    ),
    "LRRangeTest": some(
        {"lr_range_test_step_size": steps},
        {
            "lr_range_test_min_lr": rate,
            "lr_range_test_step_rate": st.floats(0, 10),
            "lr_range_test_staircase": st.booleans(),
        },
    ),
    "OneCycle": some(
        {"cycle_min_lr": rate, "cycle_max_lr": rate, "cycle_first_step_size": steps},
        {
            "cycle_second_step_size": st.integers(0, 40),
            "cycle_first_stair_count": st.integers(0, 6),
            "cycle_second_stair_count": st.integers(0, 6),
            "decay_step_size": st.integers(0, 20),
            "decay_lr_rate": st.floats(0, 3),
            "decay_mom_rate": st.floats(0, 0.01),
            "cycle_momentum": st.booleans(),
            "cycle_min_mom": st.floats(0.5, 0.8),
            "cycle_max_mom": st.floats(0.8, 0.95),
        },
    ),
}


@pytest.mark.parametrize("name", parameters)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), optimizer=st.sampled_from([ADAM, SGD]))
def test_random_parameters_give_deepspeeds_rates_and_betas(name: str, data: Any, optimizer: dict[str, Any]) -> None:
    assert_same({"type": name, "params": data.draw(parameters[name])}, optimizer, updates=90)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "WarmupLR", "params": {}},
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 1500}},
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 1500, "warmup_num_steps": 400}},
        {"type": "LRRangeTest", "params": {}},
        {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 200}},
    ],
)
def test_defaults_are_deepspeeds(block: dict[str, Any]) -> None:
    assert_same(block, ADAM, updates=450)


def test_habits_worked_by_hand() -> None:
    """What DeepSpeed does that one would not guess (facts 22 and 37)."""
    linear = {"warmup_num_steps": 4, "warmup_type": "linear"}

    def rates(name: str, params: dict[str, Any], updates: int = 6) -> list[float]:
        schedule = ours({"type": name, "params": params}, ADAM)
        return [round(schedule(update).learning_rate, 12) for update in range(1, updates + 1)]

    assert rates("WarmupLR", {**linear, "warmup_max_lr": 1.0}) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]
    # Its decay ends at the minimum rate, not at 0.
    down = {**linear, "warmup_min_lr": 0.5, "warmup_max_lr": 1.0, "total_num_steps": 6}
    assert rates("WarmupDecayLR", down, 9) == [0.5, 0.5, 0.625, 0.75, 0.875, 1.0, 0.75, 0.5, 0.5]
    # Update 1 has rate 0 although the warm-up starts at half of the optimizer's 0.02.
    half = {**linear, "warmup_min_ratio": 0.5, "total_num_steps": 6, "cos_min_ratio": 0.0}
    assert rates("WarmupCosineLR", half, 8) == [0.0, 0.01, 0.0125, 0.015, 0.0175, 0.01, 0.0, 0.0]
    cycle = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 2}
    assert rates("OneCycle", cycle) == [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    schedule = ours({"type": "OneCycle", "params": cycle}, ADAM)
    # The cycle's own momentum of 0.8 to 0.9, its minimum first; and the JSON's second beta of 0.95 is overwritten.
    betas = [schedule(update).betas for update in range(1, 6)]
    assert [beta for beta, _ in betas] == pytest.approx([0.8, 0.85, 0.8, 0.85, 0.9])
    assert {beta for _, beta in betas} == {0.99}
    assert ours({"type": "OneCycle", "params": cycle}, SGD)(3).betas is None


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "LRRangeTest", "OneCycle"])
def test_planted_faults_are_seen(name: str) -> None:
    """Negative controls: a schedule one update late, and one advanced at each of N = 4 micro-steps."""
    params = {
        "WarmupLR": {"warmup_num_steps": 10, "warmup_max_lr": 1.0},
        "WarmupDecayLR": {"warmup_num_steps": 10, "total_num_steps": 30},
        "WarmupCosineLR": {"warmup_num_steps": 10, "total_num_steps": 30},
        "LRRangeTest": {"lr_range_test_step_size": 5},
        "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 8},
    }[name]
    block = {"type": name, "params": params}
    right = ours(block, ADAM)
    assert not differs(block, right, ADAM, 20)
    assert differs(block, lambda update: right(update + 1), ADAM, 20)
    assert differs(block, lambda update: right(4 * (update - 1) + 1), ADAM, 20)


def test_no_schedule_is_a_constant_rate() -> None:
    assert {ours(None, ADAM)(update) for update in (1, 2, 99)} == {StepSettings(0.02, (0.85, 0.95))}


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ({"type": "StepLR", "params": {"step_size": 3}}, "schedule StepLR"),
        ({"type": "WarmupLR", "params": {"last_batch_iteration": 5}}, "last_batch_iteration 5"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [1.0, 2.0]}}, "warmup_max_lr"),
    ],
)
def test_what_is_not_rebuilt_says_so(block: dict[str, Any], reason: str) -> None:
    optimizer = rebuild_optimizer(ADAM)
    assert isinstance(optimizer, Optimizer)
    answer = rebuild_schedule(block, optimizer)
    assert isinstance(answer, NotRebuilt)
    assert reason in answer.reason


@pytest.mark.parametrize("params", [{}, {"total_num_steps": "auto"}])
def test_a_number_that_is_missing_is_an_error(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="total_num_steps"):
        ours({"type": "WarmupDecayLR", "params": params}, ADAM)
