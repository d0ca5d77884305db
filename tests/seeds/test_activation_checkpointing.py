"""Recomputed activations give the same updates, to the bit, and a verification says equivalent.

Run: pytest -n 0 tests/seeds/test_activation_checkpointing.py. No bound: the recomputed forward does the same operations
on the same numbers. The gradients of one backward without an engine: tests/model/test_model.py. Not covered:
DeepSpeed's own activation checkpointing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsaccum.engine.process import Ranks
from dsaccum.verification.ranks.pools import RankPools
from tests.cases import Case, tiny_gpt
from tests.seeds.watched import run_watched
from tests.verification.verifying import MODELS, Given, found

RECOMPUTED = {
    architecture: {"architecture": architecture, "config": MODELS[architecture], "activation_checkpointing": True}
    for architecture in ("gpt2", "llama")
}


class Counted:
    """How often the first block's forward ran."""

    def __init__(self, model: Any) -> None:
        self.calls = 0
        model.transformer.h[0].mlp.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1


def trained(ranks: Ranks, stage: int, *, recompute: bool) -> tuple[dict[str, Tensor], int]:
    model = tiny_gpt()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    counted = Counted(model)
    case = Case(accumulation_steps=4, micro_batch=4, stage=stage, padded=True, steps=3)
    return run_watched(ranks, case, model=model)[1], counted.calls


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_are_bit_identical_after_three_windows(one_rank: Ranks, stage: int) -> None:
    plain, once = trained(one_rank, stage, recompute=False)
    recomputed, twice = trained(one_rank, stage, recompute=True)
    assert (once, twice) == (12, 24), "control: it really was recomputed, once in each of 12 micro-steps"
    assert [name for name, tensor in plain.items() if not torch.equal(recomputed[name], tensor)] == []


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("architecture", RECOMPUTED)
def test_a_verification_says_equivalent(architecture: str, tmp_path: Path, rank_pool: RankPools) -> None:
    case = Given(ragged=True, experiment={"model": RECOMPUTED[architecture]})
    record = case.verify(tmp_path, rank_pool)
    assert record.verdict == "equivalent", found(record)


@pytest.mark.distributed
def test_a_lost_gradient_is_noticed_all_the_same(tmp_path: Path, rank_pool: RankPools) -> None:
    """Control: the verification does look at a model whose activations are recomputed."""
    case = Given(ragged=True, experiment={"model": RECOMPUTED["gpt2"]})
    record = case.verify(tmp_path, rank_pool, fault="parameter-gradient-lost")
    assert [cause.id for cause in record.causes] == ["parameter-gradient-lost"], found(record)
