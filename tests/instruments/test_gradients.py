"""The observed gradient is the mean over N and W, to the bit, by name, at every optimizer wrapper of DeepSpeed.

Run: pytest tests/instruments/test_gradients.py. The expected values are sums of small integers, exact in bf16 (see
ledger.py), so nothing is tolerated. Not covered: offload (refused), fp16 (needs a GPU).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsaccum.engine.process import Ranks
from dsaccum.instruments.gradients import observe_steps, read_gradients, read_masters
from tests.instruments.ledger import KINDS, SHAPES, Ledger, LedgerCase, expected_gradient, run_window, start_engine
from tests.instruments.two_ranks import COMPARED, STEPS

NONE_WHERE_UNUSED = {"bf16-fp32-1"}
"""BF16_Optimizer remembers who got a gradient; the others have zeros."""
Found = list[dict[str, Any]]


def wrong(gradients: dict[str, Any], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in SHAPES if not torch.equal(gradients[name].double(), expected[name])]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(two_ranks: Found, kind: str) -> None:
    for found in two_ranks:
        for window, step in zip((0, 2), found[kind]["steps"], strict=True):
            assert wrong(step["gradients"], expected_gradient(2, STEPS, window)) == []


@pytest.mark.parametrize("kind", ["fp32-0", "fp32-1", "fp32-3", "bf16-0", "bf16-2"])
def test_one_rank(one_rank: Ranks, kind: str) -> None:
    engine = start_engine(LedgerCase(kind, STEPS), 1)
    with observe_steps(engine, snapshots=False) as steps:
        run_window(engine, 0, 1, STEPS, window=0)
    assert wrong(steps[0].gradients, expected_gradient(1, STEPS, 0)) == []
    assert "_take_model_step" not in vars(engine)  # no trace is left
    engine.destroy()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_tied_once_frozen_absent_unused_zero_or_none(two_ranks: Found, kind: str) -> None:
    gradients = two_ranks[0][kind]["steps"][0]["gradients"]
    assert set(gradients) == {*SHAPES, "unused"}
    if kind in NONE_WHERE_UNUSED:
        assert gradients["unused"] is None
    else:
        assert torch.equal(gradients["unused"], torch.zeros_like(gradients["unused"]))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_dtype_is_that_of_accumulation(two_ranks: Found, kind: str) -> None:
    expected = torch.bfloat16 if kind.startswith("bf16") and "fp32" not in kind else torch.float32
    assert two_ranks[1][kind]["steps"][0]["gradients"]["weight"].dtype == expected


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_masters_at_the_start(two_ranks: Found, kind: str) -> None:
    """The model as it was built: frozen parameters among those of the forward, fp32 masters for the trained ones."""
    built = {name: p.detach() for name, p in Ledger().named_parameters()}
    for found in two_ranks:
        parameters, masters = found[kind]["start"]
        low = torch.bfloat16 if kind.startswith("bf16") else torch.float32
        assert set(parameters) == set(built)
        assert set(masters) == set(built) - {"frozen"}
        assert all(torch.equal(parameters[name], built[name].to(low)) for name in built)
        assert all(masters[name].dtype == torch.float32 for name in masters)
        assert all(torch.equal(masters[name], built[name].to(low).float()) for name in masters)


def test_masters_show_the_empty_step_of_bf16_at_zero_0(one_rank: Ranks) -> None:
    """Control: without the remedy DeepSpeed decays the masters once at start (rate 2^-6, decay 1/2); it is seen."""
    engine = start_engine(LedgerCase("bf16-0", remedied=False), 1)
    built = dict(Ledger().named_parameters())
    expected = built["weight"].detach().to(torch.bfloat16).float() * (1 - 2.0**-7)
    torch.testing.assert_close(read_masters(engine)["weight"], expected, rtol=1e-7, atol=0)
    engine.destroy()


@pytest.mark.distributed
def test_a_gradient_that_is_not_reduced_is_seen(two_ranks: Found) -> None:
    """Control: one rank's own gradient, another window's, another N: each differs."""
    gradients = two_ranks[0]["fp32-2"]["steps"][0]["gradients"]
    for other in (expected_gradient(1, STEPS, 0), expected_gradient(2, STEPS, 1), expected_gradient(2, 1, 0)):
        assert set(wrong(gradients, other)) >= {"table", "weight", "bias"}


@pytest.mark.parametrize("kind", ["fp32-1", "fp32-2"])
def test_nothing_to_read_before_the_boundary(one_rank: Ranks, kind: str) -> None:
    """Control: where ZeRO holds no reduced gradient, none is made up."""
    engine = start_engine(LedgerCase(kind, STEPS), 1)
    with pytest.raises(RuntimeError, match="no reduced gradient"):
        read_gradients(engine)
    engine.destroy()


@pytest.mark.distributed
@pytest.mark.parametrize("kind", COMPARED)
def test_the_observed_run_is_bit_identical(two_ranks: Found, kind: str) -> None:
    """Parameters, masters and random state after three windows, two observed and one recorded, against none."""
    for found in two_ranks:
        assert found[kind]["end"] == found[kind]["alone"]
    # Control: the comparison sees a difference where there is one (another precision).
    assert two_ranks[0]["fp32-0"]["end"] != two_ranks[0]["bf16-0"]["end"]
