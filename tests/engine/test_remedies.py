"""DeepSpeed's empty optimizer step in bf16 at ZeRO 0, and that our remedy takes it back.

Run: pytest tests/engine/test_remedies.py. Not covered: FusedAdam (needs a compiler or a GPU).

The finding itself is kept as a test: if DeepSpeed mends it, `test_deepspeed_makes_an_empty_step` fails and the remedy
can go.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsaccum.engine import window_engine
from dsaccum.engine.process import Ranks
from dsaccum.engine.remedies import apply_remedies
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from tests.cases import Case, stream_of, tiny_gpt

BF16 = Case(accumulation_steps=4, micro_batch=4, clipping=0.0, precision={"bf16": {"enabled": True}})


def first_update(ranks: Ranks, case: Case, rate: float = 1e-2) -> tuple[torch.Tensor, list[str]]:
    """The change that the first optimizer step made to the embedding's fp32 master weights, and the remedies."""
    config = case.config
    config["optimizer"]["params"]["lr"] = rate
    config["scheduler"]["params"] = {"warmup_min_lr": rate, "warmup_max_lr": rate, "warmup_num_steps": 1}
    engine = WindowEngine(tiny_gpt(), config, case.batch, CausalLMLoss())
    before = tiny_gpt().bfloat16().float().transformer.wte.weight.detach()
    micro_batches = stream_of(case, ranks).window(0)
    engine.run_window(micro_batches, sum(engine.loss.count(micro_batch) for micro_batch in micro_batches))
    optimizer = engine.engine.optimizer
    masters = optimizer.fp32_groups[0] if hasattr(optimizer, "fp32_groups") else None
    if masters is not None:
        after = masters[0].detach().clone()
    else:  # ZeRO 1 keeps one flat master: the embedding comes first or the fragment is asked for
        from deepspeed.utils import safe_get_full_fp32_param

        after = safe_get_full_fp32_param(engine.engine.module.transformer.wte.weight).detach().clone()
    remedies = engine.remedies
    engine.engine.destroy()
    return after - before, remedies


def test_remedied_update_equals_zero_1(one_rank: Ranks) -> None:
    ours, remedies = first_update(one_rank, BF16)
    right, none = first_update(one_rank, replace(BF16, stage=1))
    assert len(remedies) == 1
    assert "empty optimizer step" in remedies[0]
    assert none == []
    # Same bf16 gradients, same fp32 Adam: only Adam's own float32 roundings differ.
    assert torch.allclose(ours, right, rtol=1e-4, atol=1e-7)


def test_deepspeed_makes_an_empty_step(one_rank: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control, and the finding: without the remedy the first update is 0.744 of the right one."""
    monkeypatch.setattr(window_engine, "apply_remedies", lambda engine: [])
    wrong, _ = first_update(one_rank, BF16)
    right, _ = first_update(one_rank, replace(BF16, stage=1))
    moved = right.abs() > 1e-3
    # Count 2 instead of 1: sqrt(1 - b2**2) / sqrt(1 - b2) * (1 - b1) / (1 - b1**2) = sqrt(1.95) / 1.9 = 0.735.
    assert (wrong[moved] / right[moved]).median() == pytest.approx(1.95**0.5 / 1.9, abs=0.02)


def test_nothing_is_remedied_in_fp32(one_rank: Ranks) -> None:
    case = Case()
    engine = WindowEngine(tiny_gpt(), case.config, case.batch, CausalLMLoss())
    assert engine.remedies == []
    assert apply_remedies(engine.engine) == []
    engine.engine.destroy()
