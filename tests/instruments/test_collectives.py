"""Bytes per micro-step: the recorder, DeepSpeed's own logger and the formula agree exactly, at every wrapper.

Run: pytest tests/instruments/test_collectives.py. The numbers: 66 elements with gradient in tensors of 35, 25, 5 and 1,
and 3 that no loss uses. ZeRO 0 reduces zeros for those; BF16_Optimizer pads groups of 60 and 9 to multiples of 4;
ZeRO 3 pads each tensor to an even number. Not covered: NCCL, several nodes.
"""

from __future__ import annotations

from typing import Any

import deepspeed.comm as comm
import pytest
import torch
import torch.distributed as dist

from dsaccum.engine.process import Ranks
from dsaccum.instruments.collectives import CollectiveRecorder, classify, comms_logger_bytes
from dsaccum.instruments.traffic import TrafficPlan, expected_control_bytes, expected_gradient_bytes, expected_traffic
from tests.instruments.ledger import KINDS, LedgerCase, coefficients, run_window, start_engine
from tests.instruments.two_ranks import CLIP, STEPS, traffic_of

# Written out by hand for W = 2: elements of one reduction of the whole gradient, and control bytes at the boundary.
BY_HAND = {
    "fp32-0": (69 * 4, 4), "fp32-1": (66 * 4, 8), "fp32-2": (66 * 4, 8), "fp32-3": (70 * 4, 16),
    "bf16-0": (69 * 2, 0), "bf16-1": (66 * 2, 9), "bf16-2": (66 * 2, 9), "bf16-3": (70 * 2, 16),
    "bf16-fp32-1": (72 * 2, 0), "bf16-fp32-2": (66 * 2, 9), "bf16-fp32-3": (70 * 2, 16),
}  # fmt: skip
# 70 = 36 + 26 + 6 + 2; 72 = 60 + 12; 8 = two groups' norms of 4 bytes; 9 = and a flag; 16 = two norms in float64.
Found = list[dict[str, Any]]


def gradient_bytes(traffic: dict[str, Any]) -> list[int]:
    return [step.gradient_bytes for step in traffic["measured"]]


def _short(name: str) -> str:
    """c10d says all_gather_tensor where deepspeed.comm says all_gather_into_tensor."""
    return name.removesuffix("_tensor").removesuffix("_into")


@pytest.mark.distributed
@pytest.mark.parametrize("steps", [1, STEPS, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_per_micro_step(two_ranks: Found, kind: str, steps: int) -> None:
    once, control = BY_HAND[kind]
    every_time = KINDS[kind][0] >= 2
    for found in two_ranks:
        traffic = found[kind]["traffic"][steps]
        assert gradient_bytes(traffic) == [once if every_time else 0] * (steps - 1) + [once]
        assert [step.control_bytes for step in traffic["measured"]] == [0] * (steps - 1) + [control]


@pytest.mark.distributed
@pytest.mark.parametrize("steps", [1, STEPS, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_formula_agrees(two_ranks: Found, kind: str, steps: int) -> None:
    traffic = two_ranks[0][kind]["traffic"][steps]
    assert len(traffic["expected"]) == len(traffic["measured"]) == steps
    for expected, measured in zip(traffic["expected"], traffic["measured"], strict=True):
        assert expected.gradient_bytes == measured.gradient_bytes
        assert expected.control_bytes == measured.control_bytes
    for expected, count in zip(traffic["expected"], traffic["gradient_operations"], strict=True):
        assert expected.gradient_operations[0] <= count <= expected.gradient_operations[1]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_witness_agrees(two_ranks: Found, kind: str) -> None:
    for traffic in two_ranks[1][kind]["traffic"].values():
        ours = {_short(name): size for name, size in traffic["by_operation"].items()}
        theirs = {_short(name): size for name, size in traffic["logger"].items()}
        assert ours == theirs


@pytest.mark.parametrize("kind", ["fp32-0", "fp32-1", "fp32-2", "fp32-3", "bf16-1"])
@pytest.mark.parametrize("clipping", [0.0, CLIP])
def test_one_rank_calls_the_collectives_too(one_rank: Ranks, kind: str, clipping: float) -> None:
    engine = start_engine(LedgerCase(kind, STEPS, clipping=clipping), 1)
    run_window(engine, 0, 1, STEPS, 0)
    traffic = traffic_of(engine, 0, 1, STEPS, 1)
    # At ZeRO 0 in fp32 the norm is part of clipping; ZeRO takes it in any case. No padding at W = 1.
    once = (69 if kind == "fp32-0" else 66) * (2 if kind == "bf16-1" else 4)
    control = (4 if clipping else 0) if kind == "fp32-0" else BY_HAND[kind][1]
    every_time = kind in ("fp32-2", "fp32-3")
    assert gradient_bytes(traffic) == [once if every_time else 0] * (STEPS - 1) + [once]
    assert traffic["measured"][-1].control_bytes == control
    for expected, measured in zip(traffic["expected"], traffic["measured"], strict=True):
        assert (expected.gradient_bytes, expected.control_bytes) == (measured.gradient_bytes, measured.control_bytes)
    engine.destroy()


def test_reducing_at_every_micro_step_is_seen(one_rank: Ranks) -> None:
    """Control: a loop that reduces gradients itself off the boundary, through names bound long ago."""
    all_reduce = dist.all_reduce
    engine = start_engine(LedgerCase("fp32-0", STEPS), 1)
    with CollectiveRecorder(engine) as recorder:
        for micro_step in range(1, STEPS + 1):
            recorder.micro_step(micro_step)
            engine.backward(engine(coefficients(1, STEPS, 0)[micro_step - 1, 0]))
            if micro_step < STEPS:
                all_reduce(engine.module.table.grad)  # 35 elements
            engine.step()
    assert [step.gradient_bytes for step in recorder.per_micro_step()] == [140, 140, 140, 276]
    assert {"backward", "step", "_take_model_step"}.isdisjoint(vars(engine))
    engine.destroy()


def test_the_way_in_is_noted(one_rank: Ranks) -> None:
    """And DeepSpeed's logger, which ends the process where it knows no bandwidth, counts objects as 0 bytes."""
    engine = start_engine(LedgerCase("fp32-0", 2), 1)
    with comms_logger_bytes() as logged, CollectiveRecorder(engine) as recorder:
        dist.all_reduce(torch.ones(3))
        comm.all_reduce(torch.ones(5))
        comm.broadcast(torch.ones(7), 0)
        comm.all_gather_object([None], {"any": "object"})
    seen = [(each.operation, each.entrance, each.input_bytes) for each in recorder.operations]
    assert seen[:3] == [
        ("all_reduce", None, 12),
        ("all_reduce", "all_reduce", 20),
        ("broadcast", "broadcast", 28),
    ]
    assert {entrance for _, entrance, _ in seen[3:]} == {"all_gather_object"}
    assert logged == {"all_reduce": 20, "broadcast": 28, "all_gather_object": 0}
    logger = comm.comm.comms_logger
    assert (logger.enabled, logger.prof_all, "append" in vars(logger)) == (False, True, False)
    engine.destroy()


def test_steps_are_counted(one_rank: Ranks) -> None:
    engine = start_engine(LedgerCase("fp32-0", 2), 1)
    with CollectiveRecorder(engine) as recorder:
        for window in range(2):
            run_window(engine, 0, 1, 2, window)
    assert (recorder.step_calls, recorder.optimizer_steps) == (4, [2, 4])
    engine.destroy()


def test_the_formula_with_two_types() -> None:
    """Autocast: three tensors in bf16 and one in fp32; at ZeRO 3 and W = 2 the odd ones are padded by one element."""
    sizes = {"groups": ((100, 11), (7, 5)), "itemsizes": ((2, 2), (2, 4)), "itemsize": 4, "world_size": 2}
    common = {"accumulation_steps": 2, "clipping": True, "wrapper": "zero", "bucket": 60, **sizes}
    assert expected_gradient_bytes(TrafficPlan(stage=1, **common)) == 2 * 118 + 4 * 5
    assert expected_gradient_bytes(TrafficPlan(stage=3, **common)) == 2 * 120 + 4 * 6
    # bf16: 118 elements where no bucket holds more than 100, in at most 3 tensors. fp32: one tensor.
    assert expected_traffic(TrafficPlan(stage=1, **common))[1].gradient_operations == (3, 4)


def test_classes() -> None:
    assert classify("all_reduce", 1, torch.float32, "backward") == "gradient"
    assert classify("all_reduce", 1, torch.float32, "update") == "control"
    assert classify("all_reduce", 1, torch.float64, "elsewhere") == "control"
    assert classify("all_reduce", 1000, torch.float32, "elsewhere") == "gradient"
    assert classify("all_reduce", 1000, torch.int64, "backward") == "control"
    assert classify("reduce_scatter_tensor", 1000, torch.bfloat16, "backward") == "gradient"
    assert classify("all_gather_tensor", 1, torch.float32, "update") == "parameter"
    assert classify("all_gather", 4, torch.uint8, "elsewhere") == "control"


def test_the_formula_by_hand() -> None:
    plan = TrafficPlan(0, "bare", ((100,), (11,)), 4, 2, accumulation_steps=3, clipping=True)
    assert [(step.gradient_bytes, step.control_bytes) for step in expected_traffic(plan)] == [(0, 0), (0, 0), (444, 4)]
    zero3 = TrafficPlan(3, "zero", ((100, 11),), 2, 4, accumulation_steps=1, clipping=False)
    assert (expected_gradient_bytes(zero3), expected_control_bytes(zero3)) == (2 * 112, 8)
