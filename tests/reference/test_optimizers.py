"""Clipping and optimizers against torch's, as DeepSpeed's own code chooses them.

Run: pytest tests/reference/test_optimizers.py; with -m slow also DeepSpeed's compiled FusedAdam (a minute, a compiler).
Not covered here: the states that an engine really holds.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsaccum.reference_optimizers import (
    NotRebuilt,
    Optimizer,
    StepSettings,
    clip_coefficient,
    clipped,
    global_norm,
    rebuild_optimizer,
)

EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23}
UPDATES = 6


def adamw(**params: Any) -> dict[str, Any]:
    return {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True, **params}}


def sgd(**params: Any) -> dict[str, Any]:
    return {"type": "SGD", "params": {"lr": 0.1, **params}}


def adagrad(**params: Any) -> dict[str, Any]:
    return {"type": "Adagrad", "params": {"lr": 0.1, "weight_decay": 0.1, **params}}


BLOCKS = {
    "adamw": adamw(betas=[0.8, 0.95], eps=1e-6),
    "adamw-defaults": {"type": "AdamW", "params": {"torch_adam": True}},
    "adam-is-adamw": {**adamw(), "type": "Adam"},
    "adam-l2": {**adamw(adam_w_mode=False), "type": "adam"},
    "adamw-whatever-its-mode": {**adamw(adam_w_mode=False), "type": "ADAMW"},
    "sgd": sgd(),
    "sgd-momentum": sgd(momentum=0.9, dampening=0.3, weight_decay=0.1),
    "sgd-nesterov": sgd(momentum=0.9, nesterov=True),
    "adagrad": adagrad(lr_decay=0.2, initial_accumulator_value=0.5),
    "adagrad-defaults": {"type": "adagrad", "params": {}},
}


def rebuilt(block: dict[str, Any]) -> Optimizer:
    optimizer = rebuild_optimizer(block)
    assert isinstance(optimizer, Optimizer), optimizer
    return optimizer


def deepspeed_builds(block: dict[str, Any], parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What DeepSpeed's own engine code makes of the block, without an engine around it."""
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    lower = block["type"].lower()
    engine = SimpleNamespace(
        optimizer_name=lambda: lower if lower in DEEPSPEED_OPTIMIZERS else block["type"],
        optimizer_params=lambda: block["params"],
        zero_use_cpu_optimizer=lambda: False,
    )
    engine.get_optimizer_configuration = functools.partial(DeepSpeedEngine.get_optimizer_configuration, engine)
    return DeepSpeedEngine._configure_basic_optimizer(engine, parameters)


def start(dtype: torch.dtype) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(7, generator=random, dtype=torch.float64).to(dtype) for name in ("a", "b")}


def gradients(dtype: torch.dtype, *, gaps: bool = True) -> list[dict[str, Tensor]]:
    """One for each update; with ``gaps``, parameter b has none in updates 2 and 5."""
    random = torch.Generator().manual_seed(1)
    drawn = [
        {name: torch.randn(7, generator=random, dtype=torch.float64).to(dtype) for name in ("a", "b")}
        for _ in range(UPDATES)
    ]
    return [
        {name: g for name, g in step.items() if name == "a" or not gaps or i not in (1, 4)}
        for i, step in enumerate(drawn)
    ]


def run_theirs(
    block: dict[str, Any], dtype: torch.dtype, settings: list[StepSettings] | None = None, *, gaps: bool = True
) -> Any:
    """Parameters after each update, and the state then, in torch's names."""
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in start(dtype).items()}
    optimizer = deepspeed_builds(block, list(parameters.values()))
    history = []
    for i, gradient in enumerate(gradients(dtype, gaps=gaps)):
        if settings:
            optimizer.param_groups[0].update(lr=settings[i].learning_rate, betas=settings[i].betas)
        for name, parameter in parameters.items():
            parameter.grad = gradient[name].clone() if name in gradient else None
        optimizer.step()
        state = {
            name: {k: v.clone() if isinstance(v, Tensor) else v for k, v in optimizer.state[p].items()}
            for name, p in parameters.items()
        }
        history.append(({name: p.detach().clone() for name, p in parameters.items()}, state))
    return history


def run_ours(
    block: dict[str, Any], dtype: torch.dtype, settings: list[StepSettings] | None = None, *, gaps: bool = True
) -> Any:
    optimizer, parameters, state, history = rebuilt(block), start(dtype), {}, []
    for i, gradient in enumerate(gradients(dtype, gaps=gaps)):
        parameters, state = optimizer.step(parameters, gradient, state, settings[i] if settings else None)
        history.append((parameters, state))
    return history


def distance(ours: Any, theirs: Any) -> float:
    """Largest difference of a parameter after any update."""
    return max((a[0][n] - b[0][n]).abs().max().item() for a, b in zip(ours, theirs, strict=True) for n in a[0])


def bound(dtype: torch.dtype) -> float:
    """An update rounds a parameter below 4 (by 2 epsilons) and a step below 1 some six times (seen: 4 in all)."""
    return UPDATES * (2 + 6) * EPS[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", BLOCKS)
def test_updates_equal_those_of_the_optimizer_that_deepspeed_chooses(name: str, dtype: torch.dtype) -> None:
    """Six updates of random gradients, also with gradients missing; the bound is that of ``bound``."""
    assert distance(run_ours(BLOCKS[name], dtype), run_theirs(BLOCKS[name], dtype)) < bound(dtype)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (adamw(), {**adamw(adam_w_mode=False), "type": "Adam"}),
        (adamw(), adamw(weight_decay=0.09)),
        (adamw(), adamw(betas=[0.9, 0.99])),
        (adamw(eps=1e-3), adamw(eps=2e-3)),
        (adamw(), adamw(lr=0.0101)),
        ({"type": "AdamW", "params": {"torch_adam": True}}, {"type": "AdamW", "params": {}}),
        (sgd(momentum=0.9, dampening=0.3), sgd(momentum=0.9)),
        (sgd(momentum=0.9, nesterov=True), sgd(momentum=0.9)),
        (adagrad(lr_decay=0.2), adagrad()),
        (adagrad(initial_accumulator_value=0.5), adagrad()),
    ],
)
def test_a_setting_read_wrongly_is_seen(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    """Negative control: each planted misreading is outside float32's bound."""
    assert distance(run_ours(wrong, torch.float64), run_theirs(right, torch.float64)) > bound(torch.float32)


@pytest.mark.parametrize("name", ["adamw", "adam-l2", "sgd-momentum", "adagrad"])
def test_it_goes_on_from_a_state_that_was_taken_over(name: str) -> None:
    """From torch's own state and parameters in float32, one update in float64 equals torch's own to float32's bound.

    Negative control: for Adam, a count that is one ahead (fact 8) is outside the bound.
    """
    theirs, optimizer, gradient = (
        run_theirs(BLOCKS[name], torch.float32),
        rebuilt(BLOCKS[name]),
        gradients(torch.float32),
    )
    (before, state), (after, _) = theirs[2], theirs[3]
    master = {key: tensor.double() for key, tensor in before.items()}
    ours, _ = optimizer.step(master, gradient[3], state)
    assert all(tensor.dtype == torch.float64 for tensor in ours.values())
    assert max((ours[key] - after[key]).abs().max().item() for key in ours) < bound(torch.float32)
    if name == "adamw":
        own, _ = optimizer.step({"a": master["a"]}, {"a": gradient[3]["a"]}, state, updates_before=3)
        assert torch.equal(own["a"], ours["a"])
        ahead, _ = optimizer.step(master, gradient[3], {key: {**s, "step": s["step"] + 1} for key, s in state.items()})
        assert max((ahead[key] - after[key]).abs().max().item() for key in ahead) > 10 * bound(torch.float32)


def test_rate_and_betas_of_each_update_are_the_schedules() -> None:
    """Betas that move from update to update, as OneCycle's do; bias correction takes the current ones, like torch's."""
    settings = [StepSettings(0.01 * (i + 1), (0.9 - 0.02 * i, 0.99)) for i in range(UPDATES)]
    theirs = run_theirs(adamw(), torch.float64, settings)
    assert distance(run_ours(adamw(), torch.float64, settings), theirs) < bound(torch.float64)
    assert distance(run_ours(adamw(), torch.float64), theirs) > bound(torch.float32)


def test_a_step_changes_nothing_that_it_was_given() -> None:
    parameters, gradient = start(torch.float64), gradients(torch.float64)[0]
    _, state = rebuilt(adamw()).step(parameters, gradient, {})
    kept = {name: {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()} for name, s in state.items()}
    rebuilt(adamw()).step(parameters, gradient, state)
    assert all(torch.equal(parameters[name], tensor) for name, tensor in start(torch.float64).items())
    assert all(torch.equal(state[name]["exp_avg"], kept[name]["exp_avg"]) for name in state)


def test_hand_worked_updates_are_exact() -> None:
    """Weight 3, gradient 2.5. SGD at rate 1/2: 3 - 1.25 = 1.75; then, momentum 1/2: buffer 1.25 + 2.5, 1.75 - 1.875.

    AdamW with betas 1/2 and 3/4, eps 0, rate 1/4, decay 1/2: m and v corrected are 2.5 and 6.25, so the direction is
    1 + 3/2, and 3 - 2.5/4 = 2.375. Adagrad: 3 - 0.5 x 2.5 / 2.5 = 2.5. All bitwise, in both precisions.
    """
    for dtype in EPS:
        p, g = {"w": torch.tensor(3.0, dtype=dtype)}, {"w": torch.tensor(2.5, dtype=dtype)}
        heavy = rebuilt(sgd(lr=0.5, momentum=0.5))
        once, state = heavy.step(p, g, {})
        twice, _ = heavy.step(once, g, state)
        assert (once["w"].item(), twice["w"].item()) == (1.75, -0.125)
        adam = rebuilt(adamw(lr=0.25, betas=[0.5, 0.75], eps=0.0, weight_decay=0.5))
        assert adam.step(p, g, {})[0]["w"].item() == 2.375
        assert rebuilt(adagrad(lr=0.5, eps=0.0, weight_decay=0.0)).step(p, g, {})[0]["w"].item() == 2.5


def test_zeros_for_a_missing_gradient_decay_and_no_entry_does_not() -> None:
    """Fact 23: at rate 1/4 and decay 1/2, a zero gradient shrinks 4 to 3.5; without an entry it stays 4."""
    parameters = {"w": torch.tensor(4.0)}
    optimizer = rebuilt(adamw(lr=0.25, weight_decay=0.5))
    assert optimizer.step(parameters, {}, {})[0]["w"].item() == 4.0
    assert optimizer.step(parameters, {"w": torch.tensor(0.0)}, {})[0]["w"].item() == 3.5


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (None, "names no optimizer"),
        ({"type": "Lamb"}, "optimizer Lamb"),
        ({"type": "RMSprop"}, "optimizer RMSprop"),
        ({"type": "sgd"}, "optimizer sgd"),
        (adamw(amsgrad=True), "amsgrad True"),
        (sgd(maximize=True), "maximize True"),
        (adamw(fp32_optimizer_states=False), "fp32_optimizer_states False"),
    ],
)
def test_what_is_not_rebuilt_says_so(block: Any, reason: str) -> None:
    answer = rebuild_optimizer(block)
    assert isinstance(answer, NotRebuilt)
    assert reason in answer.reason


def test_settings_that_change_nothing_are_accepted_and_auto_is_refused() -> None:
    assert rebuilt(adamw(amsgrad=False, foreach=True, fused=None)) == rebuilt(adamw())
    with pytest.raises(ValueError, match="auto"):
        rebuild_optimizer(adamw(lr="auto"))


@pytest.mark.parametrize("limit", [0.5, 1.0, 100.0])
def test_clipping_is_that_of_zero_stage_0(one_rank: Any, limit: float) -> None:
    """DeepSpeed computes norm and coefficient in float32: 14 squares and a few operations, below 8 epsilons."""
    from deepspeed.runtime.utils import clip_grad_norm_

    gradient = gradients(torch.float32)[0]
    parameters = {name: nn.Parameter(torch.zeros(7)) for name in gradient}
    for name, parameter in parameters.items():
        parameter.grad = gradient[name].clone()
    norm = clip_grad_norm_(list(parameters.values()), limit).item()
    assert global_norm(gradient) == pytest.approx(norm, rel=8 * EPS[torch.float32])
    ours = clipped(gradient, limit)
    for name, parameter in parameters.items():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=8 * EPS[torch.float32], atol=0)
    # Negative control: the limit halved is seen, unless it does not act.
    halved = clip_coefficient(norm, limit / 2) / clip_coefficient(norm, limit)
    assert halved == pytest.approx(1.0 if limit / 2 > norm else 0.5, rel=1e-6)


@pytest.mark.parametrize("loss_scale", [1.0, 65536.0])
@pytest.mark.parametrize("limit", [0.0, 0.5, 1.0, 100.0])
def test_clipping_is_that_of_zero_stages_1_to_3(limit: float, loss_scale: float) -> None:
    """The same formula arranged differently: in float64 some 5 roundings, so 8 epsilons relative.

    Negative control: without the 1e-6 it is off by more than 1e-7 where clipping acts.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    gradient = gradients(torch.float64)[0]
    norm = torch.tensor(global_norm(gradient) * loss_scale, dtype=torch.float64)
    flat = torch.cat(list(gradient.values())) * loss_scale
    optimizer = SimpleNamespace(clip_grad=limit, loss_scale=loss_scale, device="cpu")
    first = flat.clone()
    DeepSpeedZeroOptimizer.unscale_and_clip_grads(optimizer, [first], norm)
    group = SimpleNamespace(grad=flat.clone())
    optimizer.fp32_partitioned_groups_flat = [group]
    DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads(optimizer, 0, norm)
    ours = torch.cat(list(clipped(gradient, limit).values()))
    for theirs in (first, group.grad):
        torch.testing.assert_close(ours, theirs, rtol=8 * EPS[torch.float64], atol=0)
    if 0 < limit < global_norm(gradient):
        assert abs(limit / global_norm(gradient) / clip_coefficient(global_norm(gradient), limit) - 1) > 1e-7


def test_clipping_of_a_gradient_at_the_limit() -> None:
    """A 3-4-5 triangle: norm exactly 5, limit 5 shrinks it by 1e-6 / 5; limit 0 is none."""
    gradient = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    assert global_norm(gradient) == 5.0
    assert 1 - clip_coefficient(5.0, 5.0) == pytest.approx(2e-7, rel=1e-6)
    assert clip_coefficient(5.0, 0.0) == clip_coefficient(5.0, 5.1) == 1.0
    assert math.isclose(global_norm(clipped(gradient, 1.0)), 1 / (1 + 2e-7), rel_tol=1e-7)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "Adam-l2"])
def test_deepspeeds_fused_adam_is_the_same_mathematics(one_rank: Any, name: str, bias_correction: bool) -> None:
    """The compiled kernel in float32, with its own default of no weight decay where none is given.

    It counts updates in the state of the group's last parameter alone (the others stay at 0), so a reference that
    believes those counts would be wrong, and every parameter has a gradient in every update here.
    """
    params: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "bias_correction": bias_correction}
    if name == "Adam-l2":
        params["adam_w_mode"] = False
    dtype = torch.float32
    for block in ({"type": name.split("-")[0], "params": params}, {"type": "AdamW", "params": {}}):
        theirs = run_theirs(block, dtype, gaps=False)
        assert distance(run_ours(block, dtype, gaps=False), theirs) < bound(dtype)
        before, state = theirs[-2]
        assert (state["a"]["step"], state["b"]["step"]) == (0, UPDATES - 1)
        after, _ = rebuilt(block).step(before, gradients(dtype, gaps=False)[-1], state, updates_before=UPDATES - 1)
        assert max((after[key] - theirs[-1][0][key]).abs().max().item() for key in after) < bound(dtype)
