"""DeepSpeed's learning-rate schedules as closed formulas: the rate and the betas of update 1, 2, 3, ...

A schedule sets the rate of update 1 when it is made, and counts i = 0, 1, 2, ... after each update that was applied, so

    update    1        2    3    4
    i         none     0    1    2    ...     i = update - 2

Where the formula at i = 0 is the starting rate again, that rate serves two updates: the warm-ups do so. A skipped step
does not advance the schedule: count applied updates only. Habits are those of DeepSpeed 0.19; see the docs of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dsaccum.reference_optimizers import NotRebuilt, Optimizer, StepSettings

Schedule = Callable[[int], StepSettings]
"""update number, from 1 -> what that update uses."""


def rebuild_schedule(block: Mapping[str, Any] | None, optimizer: Optimizer) -> Schedule | NotRebuilt:
    """The schedule of a DeepSpeed JSON's ``scheduler`` block, its ``"auto"`` values resolved before.

    Args:
        block: ``{"type": ..., "params": {...}}``, or None for a constant rate.
        optimizer: whose rate and betas the schedule starts from.

    Raises:
        ValueError: a required number is missing, or still ``"auto"``.
    """
    if block is None or block.get("type") is None:
        return lambda update: StepSettings(optimizer.learning_rate, optimizer.betas)
    name, given = block["type"], dict(block.get("params") or {})
    if name not in _SCHEDULES:
        return NotRebuilt(f"schedule {name} is not rebuilt here")
    defaults, build = _SCHEDULES[name]
    if unknown := sorted(given.keys() - defaults.keys()):
        return NotRebuilt(f"schedule {name} with {unknown[0]} {given[unknown[0]]} is not rebuilt here")
    params = {}
    for key, value in {**defaults, **given}.items():
        # A list has one value for each parameter group; the JSON's optimizer has one group.
        params[key] = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        if isinstance(params[key], list | tuple):
            return NotRebuilt(f"schedule {name} with {key} {value} is not rebuilt here")
        if params[key] == "auto" or (params[key] is None and key in _REQUIRED):
            raise ValueError(f"schedule {name} needs a number for {key}, not {value!r}")
    return build(params, optimizer)


def _warmup_lr(params: dict[str, Any], optimizer: Optimizer) -> Schedule:
    """From the minimum to the maximum, then constant; the maximum is the optimizer's rate if not given."""
    low, high = params["warmup_min_lr"], params["warmup_max_lr"]
    high = optimizer.learning_rate if high is None else high

    def at(update: int) -> StepSettings:
        return StepSettings(low + (high - low) * min(1.0, _warmup(params, update - 2)), optimizer.betas)

    return at


def _warmup_decay_lr(params: dict[str, Any], optimizer: Optimizer) -> Schedule:
    """From the minimum to the maximum, then linearly back to the *minimum* at ``total_num_steps``."""
    low, high, total = params["warmup_min_lr"], params["warmup_max_lr"], params["total_num_steps"]
    warm = _warmup_steps(params)

    def at(update: int) -> StepSettings:
        i = update - 2
        part = _warmup(params, i) if i < warm else max(0.0, (total - i) / max(1.0, total - warm))
        return StepSettings(low + (high - low) * part, optimizer.betas)

    return at


def _warmup_cosine_lr(params: dict[str, Any], optimizer: Optimizer) -> Schedule:
    """Ratios of the optimizer's rate. Update 1 has rate 0 whatever ``warmup_min_ratio`` is; it is the rate of update 2.

    After the warm-up half a cosine down to ``cos_min_ratio``, where it stays (before 0.19 it came up again).
    """
    low, floor, total = params["warmup_min_ratio"], params["cos_min_ratio"], params["total_num_steps"]
    warm = _warmup_steps(params)

    def ratio(i: int) -> float:
        if i < 0:
            return 0.0
        if i < warm:
            return low + (1 - low) * _warmup(params, i)
        progress = min(1.0, (i - warm + 1) / max(1, total - warm))
        return max(0.0, floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)

    return lambda update: StepSettings(optimizer.learning_rate * ratio(update - 2), optimizer.betas)


def _lr_range_test(params: dict[str, Any], optimizer: Optimizer) -> Schedule:
    """The minimum times 1 + rate x (updates done / step size), the quotient rounded down for a staircase."""

    def at(update: int) -> StepSettings:
        stretches = (update - 1) / params["lr_range_test_step_size"]
        if params["lr_range_test_staircase"]:
            stretches = math.floor(stretches)
        rate = params["lr_range_test_min_lr"] * (1 + params["lr_range_test_step_rate"] * stretches)
        return StepSettings(rate, optimizer.betas)

    return at


def _one_cycle(params: dict[str, Any], optimizer: Optimizer) -> Schedule:
    """Up, down, then a decay; the first beta moves against the rate, the second becomes 0.99 whatever the JSON says.

    Update 1 uses the *minimum* momentum, though its rate is the minimum too; from update 2 on momentum falls from the
    maximum. Without betas (SGD, Adagrad) momentum is left alone.
    """
    low, high = params["cycle_min_lr"], params["cycle_max_lr"]
    low_beta, high_beta = params["cycle_min_mom"], params["cycle_max_mom"]
    rise = float(params["cycle_first_step_size"])
    fall = rise if params["cycle_second_step_size"] is None else float(params["cycle_second_step_size"])
    rise_stairs = params["cycle_first_stair_count"]
    fall_stairs = params["cycle_second_stair_count"]
    fall_stairs = rise_stairs if fall_stairs is None else fall_stairs
    stretch = params["decay_step_size"]

    def height(done: int) -> float:
        """0 at the cycle's ends, 1 at its peak."""
        position = done % (rise + fall)
        rising = position <= rise
        numerator, length = (position, rise) if rising else (rise + fall - position, fall)
        stairs = rise_stairs if rising else fall_stairs
        return math.floor(numerator * stairs / length) / stairs if stairs > 0 else numerator / length

    def at(update: int) -> StepSettings:
        done = update - 1
        if done - 1 < rise + fall:
            up = height(done)
            rate, beta = low + (high - low) * up, high_beta - (high_beta - low_beta) * up
        else:
            decayed = (done - rise - fall) / stretch if stretch else 0.0
            rate = low / (1 + params["decay_lr_rate"] * decayed)
            beta = high_beta * (1 + params["decay_mom_rate"] * decayed)
        if optimizer.betas is None or not params["cycle_momentum"]:
            return StepSettings(rate, optimizer.betas)
        return StepSettings(rate, (low_beta if update == 1 else beta, 0.99))

    return at


def _warmup_steps(params: dict[str, Any]) -> int:
    return max(2, params["warmup_num_steps"])


def _warmup(params: dict[str, Any], i: int) -> float:
    """How far the warm-up is at count i: 0 at its start and before, 1 at its end (logarithmic: one count earlier)."""
    warm, i = _warmup_steps(params), max(0, i)
    if i >= warm:
        return 1.0
    return i / warm if params["warmup_type"] == "linear" else math.log(i + 1) / math.log(warm)


_REQUIRED = {"total_num_steps", "cycle_min_lr", "cycle_max_lr"}
_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
_SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any], Optimizer], Schedule]]] = {
    "WarmupLR": ({**_WARMUP, "warmup_min_lr": 0.0, "warmup_max_lr": None}, _warmup_lr),
    "WarmupDecayLR": (
        {**_WARMUP, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "total_num_steps": None},
        _warmup_decay_lr,
    ),
    "WarmupCosineLR": (
        {**_WARMUP, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, "total_num_steps": None},
        _warmup_cosine_lr,
    ),
    "LRRangeTest": (
        {
            "lr_range_test_min_lr": 1e-3,
            "lr_range_test_step_size": 2000,
            "lr_range_test_step_rate": 1.0,
            "lr_range_test_staircase": False,
        },
        _lr_range_test,
    ),
    "OneCycle": (
        {
            "cycle_min_lr": None,
            "cycle_max_lr": None,
            "decay_lr_rate": 0.0,
            "cycle_first_step_size": 2000,
            "cycle_second_step_size": None,
            "cycle_first_stair_count": 0,
            "cycle_second_stair_count": None,
            "decay_step_size": 0,
            "cycle_momentum": True,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.9,
            "decay_mom_rate": 0.0,
        },
        _one_cycle,
    ),
}
