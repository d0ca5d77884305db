"""An optimizer step of torch's own, in float32, is within the bound of the update, and another step is not.

Run: pytest -n 0 tests/verification/test_update_check.py. The bound is ``update_check.py``'s own. Negative controls: a
rate, a decay, a count that are slightly other. Not covered: what DeepSpeed makes of these optimizers
(test_equivalent.py, test_random_cases.py), clipping.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsaccum.instruments.gradients import Snapshot
from dsaccum.reference_optimizers import Optimizer, StepSettings, rebuild_optimizer
from dsaccum.verification.comparison.update_check import Hypothesis, UpdateCheck, check_update
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
