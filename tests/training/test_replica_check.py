"""While training, ranks whose parameters come to differ stop the run within a few steps, and the tensor is named.

Run: pytest tests/training/test_replica_check.py. Its cost is measured by tests/benchmarks/run_time_checks.py. Not
covered: ZeRO 3, where no rank holds a whole copy of most parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from dsaccum.training.control import ControlExchange
from dsaccum.training.loop import TrainingLoop
from dsaccum.training.outcome import RunFailed
from dsaccum.training.replica_check import DIGEST_BITS, ReplicaCheck, digest_of
from dsaccum.training.stop_request import StopRequest
from tests.cases import Case, StillDog, stream_of, tiny_gpt
from tests.ranks import run_on_ranks

CASE = Case(world_size=2, accumulation_steps=2, micro_batch=2, steps=7)
WARY = 2
"""Steps between two checks."""


class Drifting(nn.Module):
    """A GPT of which one rank moves one bias by a hair, once, in a forward."""

    def __init__(self, rank: int, at_call: int) -> None:
        super().__init__()
        self.gpt, self.calls, self.at_call = tiny_gpt(), 0, at_call if rank == 1 else 0

    def forward(self, **inputs: torch.Tensor) -> Any:
        self.calls += 1
        outputs = self.gpt(**inputs)
        if self.calls == self.at_call:
            with torch.no_grad():
                self.gpt.transformer.h[0].mlp.c_fc.bias[3] += 1e-6
        return outputs


def train(ranks: Ranks, at_call: int, every: int) -> tuple[list[int], str]:
    """Steps recorded, and how it ended."""
    engine = WindowEngine(Drifting(ranks.rank, at_call), CASE.config, CASE.batch, CausalLMLoss())
    recorded: list[int] = []
    loop = TrainingLoop(
        engine=engine,
        stream=stream_of(CASE, ranks),
        exchange=ControlExchange(ranks.rank, engine.device),
        watchdog=StillDog(),
        stop=StopRequest(),
        record=lambda metrics: recorded.append(metrics.step),
        note=lambda _: None,
        replicas=ReplicaCheck(engine.engine, every, ranks.world_size),
    )
    try:
        loop.run(CASE.steps, CASE.max_skipped)
    except RunFailed as failure:
        return recorded, str(failure)
    return recorded, "done"


def several_runs(ranks: Ranks) -> dict[str, tuple[list[int], str]]:
    return {
        # Two forwards to a step: the 5th is in step 3, which the check of step 4 sees.
        "in the middle": train(ranks, at_call=5, every=WARY),
        "in the last step": train(ranks, at_call=2 * CASE.steps, every=1),
        "never": train(ranks, at_call=0, every=1),
        "unwatched": train(ranks, at_call=5, every=0),
    }


@pytest.mark.distributed
def test_ranks_that_drift_apart_stop_on_both_and_the_tensor_is_named(tmp_path: Path) -> None:
    ranks = run_on_ranks(several_runs, 2, tmp_path)
    assert ranks[0] == ranks[1], "all ranks stop at the same place"
    recorded, said = ranks[0]["in the middle"]
    assert recorded == [1, 2, 3, 4, 5], "told one window after the check of step 4"
    assert said.startswith("the ranks' copies of gpt.transformer.h.0.mlp.c_fc.bias")
    assert "differ after step 4 (run.replica_check_every)" in said
    every_step = list(range(1, CASE.steps + 1))
    recorded, said = ranks[0]["in the last step"]
    assert recorded == every_step
    assert f"differ after step {CASE.steps}" in said
    assert ranks[0]["never"] == (every_step, "done")
    assert ranks[0]["unwatched"] == (every_step, "done"), "control: nothing else notices"


def test_a_digest_tells_names_and_values_apart() -> None:
    digests = {digest_of(sums) for sums in ({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"b": 1, "a": 2}, {"a": 1, "c": 2}, {})}
    assert len(digests) == 5
    assert all(0 < digest < 2**DIGEST_BITS for digest in digests)
    assert digest_of({"a": 1}) == digest_of({"a": 1})


def test_one_rank_has_nothing_to_compare(one_rank: Ranks) -> None:
    check = ReplicaCheck(None, every=1, world_size=1)
    check.look(1)
    assert (check.digest, check.pending, check.apart) == (0, False, False)
