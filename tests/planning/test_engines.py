"""What each of DeepSpeed's wrappers holds, in bytes that can be counted by hand. The source they follow is 0.19.8's.

Run: pytest tests/planning/test_engines.py -n 0. Not covered: whether the source does so, see test_against_engine.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsaccum.planning.engines.bf16_optimizer import BF16Optimizer
from dsaccum.planning.engines.engine import Engine
from dsaccum.planning.engines.layout import OptimizerUse
from dsaccum.planning.engines.ledger import Ledger
from dsaccum.planning.engines.partitioned import Partitioned, Partitions
from dsaccum.planning.engines.sharded import Sharded
from dsaccum.planning.engines.unpartitioned import HalfFused, HalfUnfused, Unpartitioned
from tests.planning.subjects import layout

SIZES = [40, 60, 20]
P = sum(SIZES)


def backward(engine: Engine, *, boundary: bool) -> int:
    """One micro-step with no activations; returns the most that was held in it."""
    engine.ledger.mark()
    engine.begin([], boundary=boundary)
    for parameter in reversed(range(len(SIZES))):
        engine.ledger.take("gradients", engine.gradient(parameter))
    engine.finish()
    return sum(engine.ledger.highest.values())


def step(engine: Engine) -> int:
    """The optimizer step; returns the most that was held in it."""
    engine.ledger.mark()
    engine.step()
    return sum(engine.ledger.highest.values())


def held(engine: Engine) -> int:
    return sum(engine.ledger.held.values())


def test_nothing_partitioned_in_fp32_holds_16_bytes_and_20_when_reducing() -> None:
    # Parameter 4, gradient 4, Adam 8; the all-reduce flattens all gradients into one more copy.
    engine = Unpartitioned(layout(SIZES, 0))
    assert held(engine) == 12 * P
    assert backward(engine, boundary=False) == 16 * P
    assert backward(engine, boundary=True) == 20 * P
    assert step(engine) == 16 * P + 8 * max(SIZES)
    assert held(engine) == 12 * P


def test_bf16_without_zero_needs_a_whole_fp32_gradient_at_the_step() -> None:
    # Parameter 2, its gradient 2, master 4, Adam 8, and the fp32 gradient 4 beside the other.
    bf16 = layout(SIZES, 0, precision="bf16", accumulation="bf16")
    engine = HalfUnfused(bf16)
    assert backward(engine, boundary=True) == 18 * P
    assert step(engine) == 20 * P + 8 * max(SIZES)
    fused = HalfFused(replace(bf16, optimizer=lambda sizes: OptimizerUse(8 * sum(sizes), 0)))
    backward(fused, boundary=True)
    assert step(fused) == 24 * P  # twice in fp32, beside the one in bf16


def test_zero_1_in_bf16_and_fp32_keeps_the_whole_gradient_in_both() -> None:
    engine = BF16Optimizer(layout(SIZES, 1, precision="bf16", world_size=4))
    assert held(engine) == 2 * P + 4 * P + 12 * P // 4
    backward(engine, boundary=True)
    assert step(engine) == (2 + 4 + 2) * P + 12 * P // 4 + 8 * P // 4


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_step_a_flat_copy_of_the_partitions_gradient(stage: int) -> None:
    engine = Partitioned(layout(SIZES, stage))
    assert held(engine) == 16 * P
    backward(engine, boundary=True)
    assert step(engine) == 4 * P + 12 * P + 4 * P + 8 * P
    assert held(engine) == 16 * P


def test_zero_1_keeps_its_bucket_through_the_window_and_zero_2_makes_it_at_each_backward() -> None:
    bucket = 4 * 100
    one, two = Partitioned(layout(SIZES, 1)), Partitioned(layout(SIZES, 2))
    for engine in (one, two):
        backward(engine, boundary=False)
    assert held(one) == 16 * P + 4 * P + bucket
    assert held(two) == 16 * P + 4 * P
    assert backward(two, boundary=True) == 16 * P + 4 * P + 4 * P + bucket  # the sum, and what is added to it


def test_the_reduce_bucket_is_a_term_of_its_own() -> None:
    small, default = (Partitioned(layout(SIZES, 2, reduce_bucket=size)) for size in (100, 500_000_000))
    assert backward(default, boundary=False) - backward(small, boundary=False) == 4 * (500_000_000 - 100)


def test_a_gradient_larger_than_the_bucket_stays_where_it_is() -> None:
    engine = Partitioned(layout(SIZES, 2, reduce_bucket=50))
    engine.begin([], boundary=False)
    assert engine.gradient(1) == 4 * 60
    assert engine.gradient(0) == 0


def test_partitions_cut_parameters() -> None:
    last = Partitions.of(layout(SIZES, 2, world_size=4, rank=3))
    assert (last.size, last.flat, last.own, last.touched) == (30, 120, {1: 10, 2: 20}, 80)
    assert last.pieces([0, 1, 2]) == 4
    assert last.pieces([2]) == 1


def test_zero_3_holds_a_master_in_fp32_too_and_copies_the_gradient_at_the_step() -> None:
    engine = Sharded(layout(SIZES, 3, world_size=2))
    bucket = 4 * 100
    assert held(engine) == (4 + 4 + 12) * P // 2 + bucket
    backward(engine, boundary=True)
    assert step(engine) == (4 + 4 + 12 + 4 + 8) * P // 2 + bucket


def test_zero_3_gathers_a_module_and_lets_it_go_unless_it_comes_again_soon() -> None:
    visits = [0, 1, 2, 2, 1, 0]
    near, far = (Sharded(layout(SIZES, 3, world_size=2, max_reuse=reuse)) for reuse in (10**9, 1))
    for engine, at_each in ((near, [40, 100, 120]), (far, [40, 60, 20])):
        before = engine.ledger.held["parameters"]
        engine.begin(visits, boundary=False)
        for module, elements in enumerate(at_each):
            engine.enter(module)
            assert engine.ledger.held["parameters"] - before == 4 * elements
            engine.leave(module)
        for module in (2, 1, 0):
            engine.enter(module)
            engine.leave(module)
        engine.finish()
        assert engine.ledger.held["parameters"] == before
        assert engine.ledger.held["buffers"] == 400  # no flat tensor is left


def test_one_rank_gathers_nothing() -> None:
    engine = Sharded(layout(SIZES, 3, max_reuse=10**9))
    before = held(engine)
    engine.begin([0, 1], boundary=False)
    engine.enter(0)
    engine.enter(1)
    assert held(engine) == before


def test_the_ledger_remembers_its_highest_moment_whole() -> None:
    ledger = Ledger()
    ledger.take("gradients", 5)
    with ledger.while_needed("buffers", 7):
        pass
    ledger.free("gradients", 5)
    ledger.take("parameters", 9)
    assert ledger.highest == {"parameters": 0, "gradients": 5, "optimizer": 0, "buffers": 7}
