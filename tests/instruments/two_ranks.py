"""All that needs two ranks, measured in one start: for each wrapper an observed engine and one left alone."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

import pytest
import torch

from dsaccum.engine.process import Ranks
from dsaccum.instruments.collectives import CollectiveRecorder, comms_logger_bytes
from dsaccum.instruments.gradients import ObservedStep, observe_steps, read_masters, read_parameters
from dsaccum.instruments.optimizer_saw import optimizer_saw
from dsaccum.instruments.replicas import differing_replicas, parameter_checksums
from dsaccum.instruments.traffic import expected_traffic, plan_of
from tests.instruments.ledger import KINDS, LedgerCase, run_window, start_engine
from tests.instruments.shared import measured_once

STEPS, CLIP = 4, 0.25
UNUSED = ["unused"]
COMPARED = ("fp32-0", "fp32-1", "fp32-2", "fp32-3", "bf16-0", "bf16-1", "bf16-fp32-1")
"""Kinds that are also run without any instrument: one of each wrapper and stage."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, by kind of wrapper: what ``measure`` found."""
    return measured_once(tmp_path_factory, "instruments-two-ranks", measure, world_size=2)


def measure(ranks: Ranks) -> dict[str, dict[str, Any]]:
    found = {kind: _observed(ranks, kind) for kind in KINDS}
    for kind in COMPARED:
        found[kind]["alone"] = _left_alone(ranks, kind)
    return found


def traffic_of(engine: Any, rank: int, world_size: int, steps: int, window: int) -> dict[str, Any]:
    """One window, seen by the recorder and by DeepSpeed's logger; and what the formula says."""
    with comms_logger_bytes() as logger, CollectiveRecorder(engine) as recorder:
        run_window(engine, rank, world_size, steps, window)
    by_operation: dict[str, int] = {}
    for operation in recorder.operations:
        by_operation[operation.operation] = by_operation.get(operation.operation, 0) + operation.input_bytes
    return {
        "measured": recorder.per_micro_step(),
        "gradient_operations": [
            sum(1 for o in recorder.operations if o.micro_step == step and o.kind == "gradient")
            for step in range(1, steps + 1)
        ],
        "by_operation": by_operation,
        "logger": dict(logger),
        "expected": expected_traffic(plan_of(engine, without_gradient=UNUSED)),
    }


def _observed(ranks: Ranks, kind: str) -> dict[str, Any]:
    rank, world_size = ranks.rank, ranks.world_size
    engine = start_engine(LedgerCase(kind, STEPS, clipping=CLIP), world_size)
    start = read_parameters(engine), read_masters(engine)
    with observe_steps(engine) as steps:
        run_window(engine, rank, world_size, STEPS, 0)
    traffic = {STEPS: traffic_of(engine, rank, world_size, STEPS, 1)}
    with observe_steps(engine) as more:
        run_window(engine, rank, world_size, STEPS, 2)
    end = _bits(engine)
    run_window(engine, rank, world_size, STEPS, 3)  # 16 micro-steps so far: a boundary for N = 16 too
    for number in (16, 1):
        engine.set_train_batch_size(number * world_size)
        traffic[number] = traffic_of(engine, rank, world_size, number, 3)
    found = {
        "start": start,
        "steps": [_plain(step) for step in (*steps, *more)],
        "traffic": traffic,
        "end": end,
        "replicas": _replicas(engine, rank),
    }
    engine.destroy()
    return found


def _left_alone(ranks: Ranks, kind: str) -> str:
    engine = start_engine(LedgerCase(kind, STEPS, clipping=CLIP), ranks.world_size)
    for window in range(3):
        run_window(engine, ranks.rank, ranks.world_size, STEPS, window)
    end = _bits(engine)
    engine.destroy()
    return end


def _replicas(engine: Any, rank: int) -> dict[str, list[str]]:
    """Names that differ between ranks: as they are, and after rank 1 changed the last bit of one parameter."""
    clean = differing_replicas(engine)
    held = parameter_checksums(engine)
    if "bias" in held and rank == 1:
        with torch.no_grad():
            bias = dict(engine.module.named_parameters())["bias"]
            bias[3] = torch.nextafter(bias[3], bias[3] + 1)
    return {"held": list(held), "clean": clean, "touched": differing_replicas(engine)}


def _bits(engine: Any) -> str:
    """Parameters, masters and the random state, to the bit."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for values in (read_parameters(engine), read_masters(engine)):
        for name, tensor in values.items():
            digest.update(name.encode() + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(step: ObservedStep) -> dict[str, Any]:
    assert step.before is not None
    assert step.after is not None
    return {
        "gradients": step.gradients,
        "applied": step.applied,
        "before": asdict(step.before),
        "after": asdict(step.after),
        "saw": optimizer_saw(step),
    }
