"""An optimizer step of torch's own, in float32, is within the bound of the update, and another step is not.

Run: pytest -n 0 tests/verification/test_update_check.py. The bound is ``update_check.py``'s own. Negative controls: a
rate, a decay, a count that are slightly other, and a coefficient of clipping further off than its norm may be. Not
covered: what DeepSpeed makes of these optimizers (test_equivalent.py, test_random_cases.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsaccum.instruments.gradients import Snapshot
from dsaccum.instruments.optimizer_saw import SeenGradient
from dsaccum.reference_optimizers import Optimizer, StepSettings, rebuild_optimizer
from dsaccum.verification.comparison.hypothesis import Hypothesis
from dsaccum.verification.comparison.update_check import (
    SawCheck,
    UpdateCheck,
    check_optimizer_saw,
    check_update,
    hypothesis_of,
)
from dsaccum.verification.subject.capture import OptimizerStep

DECAY, BETAS = 0.01, (0.9, 0.999)
RATES = {"Adam": 3e-3, "SGD": 1.0, "Adagrad": 0.01}
P_CANCELS, G_CANCELS = 25 / 1024, -(2.0**-12)
"""0.01 x 25/1024 is 2^-12 to the last digit; with float32's 0.01 the sum is 5e-12, and Adam still moves."""
CLASSES: dict[str, Any] = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}


def one_step(kind: str, p: Tensor, g: Tensor, *, rate_times: float = 1.0, decay: float = DECAY) -> OptimizerStep:
    """What torch's optimizer does, as a rank would have captured it."""
    rate = RATES[kind] * rate_times
    parameter = nn.Parameter(p.clone())
    parameter.grad = g.clone()
    CLASSES[kind]([parameter], lr=rate, weight_decay=decay).step()
    before, after = (
        Snapshot({"w": value}, {"w": value}, {}, {"w": {"lr": rate}}) for value in (p, parameter.detach().clone())
    )
    return OptimizerStep(1, {"w": g}, 1.0, True, None, before, after)


def checked(kind: str, step: OptimizerStep, updates_before: int = 0) -> UpdateCheck:
    params = {"lr": RATES[kind], "weight_decay": DECAY} | (
        {"adam_w_mode": False, "eps": 1e-8} if kind == "Adam" else {}
    )
    optimizer = rebuild_optimizer({"type": kind, "params": params})
    assert isinstance(optimizer, Optimizer)
    return check_update(step, optimizer, Hypothesis(StepSettings(RATES[kind], BETAS), updates_before, coefficient=1.0))


def drawn(size: int = 2048) -> tuple[Tensor, Tensor]:
    """A parameter and its gradient as bf16 training has them: few digits, so that sums may cancel to nothing."""
    generator = torch.Generator().manual_seed(0)
    p, g = (torch.randn(size, generator=generator) * scale for scale in (0.02, 3e-4))
    p, g = p.bfloat16().float(), g.bfloat16().float()
    p[7], g[7] = P_CANCELS, G_CANCELS
    return p, g


@pytest.mark.parametrize("kind", CLASSES)
def test_torchs_own_step_is_right(kind: str) -> None:
    """One element's gradient and decay cancel: what float32 leaves of them, Adam and Adagrad enlarge."""
    check = checked(kind, one_step(kind, *drawn()))
    assert check.passed, check.worst
    assert check.moved


def test_where_nothing_cancels_the_bound_is_as_narrow_as_before() -> None:
    p, g = drawn()
    with_it = checked("Adam", one_step("Adam", p, g)).tensors[0]
    p[7] = -P_CANCELS
    without = checked("Adam", one_step("Adam", p, g)).tensors[0]
    assert without.bound < 3e-6
    assert without.error <= without.bound
    assert with_it.error > without.bound, "the bound without the cancelling element would have been a false alarm"
    assert with_it.bound < 1e-3


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Adam", {"rate_times": 1.001}),
        ("SGD", {"rate_times": 1.001}),
        ("Adagrad", {"rate_times": 1.01}),
        ("Adam", {"decay": DECAY * 1.1}),
        ("SGD", {"decay": DECAY * 1.01}),
        ("Adagrad", {"decay": DECAY * 1.1}),
        ("Adam", {"decay": 0.0}),
    ],
)
def test_another_step_is_wrong(kind: str, changes: dict[str, float]) -> None:
    check = checked(kind, one_step(kind, *drawn(), **changes))
    assert not check.passed


def test_another_count_is_wrong() -> None:
    assert not checked("Adam", one_step("Adam", *drawn()), updates_before=1).passed


LIMIT, ELEMENTS = 1.0, 1 << 20
"""u sqrt(P) of so many elements is 6e-5."""


def second_step(coefficient_times: float) -> tuple[OptimizerStep, Optimizer]:
    """Adam's second, after gradients of another size; the norm was a little off, as float32 sums are."""
    generator = torch.Generator().manual_seed(0)
    p, first, second = (torch.randn(ELEMENTS, generator=generator) * scale for scale in (0.02, 3e-3, 1e-2))
    parameter = nn.Parameter(p)
    optimizer = torch.optim.Adam([parameter], lr=RATES["Adam"])
    parameter.grad = first / first.norm()
    optimizer.step()

    def snapshot() -> Snapshot:
        weights = parameter.detach().clone()
        states = {name: value.clone() for name, value in optimizer.state[parameter].items()}
        return Snapshot({"w": weights}, {"w": weights}, {"w": states}, {"w": {"lr": RATES["Adam"]}})

    before = snapshot()
    parameter.grad = (second.double() / float(second.double().norm()) * coefficient_times).float()
    seen = {"w": SeenGradient(parameter.grad.double(), 0.0)}
    optimizer.step()
    rule = rebuild_optimizer({"type": "Adam", "params": {"lr": RATES["Adam"], "adam_w_mode": False, "eps": 1e-8}})
    assert isinstance(rule, Optimizer)
    return OptimizerStep(1, {"w": second}, 1.0, True, None, before, snapshot(), seen), rule


def clipped_update(coefficient_times: float, *, seen: bool) -> tuple[SawCheck, UpdateCheck]:
    step, rule = second_step(coefficient_times)
    saw = check_optimizer_saw(step, LIMIT)
    assert saw is not None
    known = saw if seen else None
    hypothesis = hypothesis_of(step, known, LIMIT, StepSettings(RATES["Adam"], BETAS), 1, frozenset())
    return saw, check_update(step, rule, hypothesis)


@pytest.mark.parametrize("seen", [True, False])
def test_what_the_norm_of_clipping_rounds_is_no_wrong_update(seen: bool) -> None:
    saw, update = clipped_update(1 + 1.5e-5, seen=seen)
    assert saw.clips
    assert saw.passed
    assert update.passed, update.worst
    step, rule = second_step(1 + 1.5e-5)
    exact = check_update(step, rule, Hypothesis(StepSettings(RATES["Adam"], BETAS), 1, saw.coefficient))
    assert not exact.passed, "it would have been a false alarm"


def test_another_coefficient_is_wrong() -> None:
    """Beyond what the norm may round; without a trace of it the update shows it."""
    saw, update = clipped_update(1 + 1e-3, seen=True)
    assert not saw.passed
    assert update.passed, "the update follows from the gradient that reached the optimizer"
    assert not clipped_update(1 + 1e-3, seen=False)[1].passed


@pytest.mark.parametrize("seen", [True, False])
def test_another_rate_is_wrong_where_clipping_acts(seen: bool) -> None:
    step, rule = second_step(1 + 1.5e-5)
    saw = check_optimizer_saw(step, LIMIT) if seen else None
    settings = StepSettings(RATES["Adam"] * 1.001, BETAS)
    assert not check_update(step, rule, hypothesis_of(step, saw, LIMIT, settings, 1, frozenset())).passed
