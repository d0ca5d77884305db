"""On ragged data the reduced gradient is the big batch's token mean, per parameter, also in and after a short window.

Run: pytest tests/engine/test_gradient_is_the_token_mean.py. Not covered: ZeRO 1 to 3, whose gradients are judged
through losses and parameters in tests/training (DeepSpeed shards them).

Bound: the error of a parameter's gradient is divided by S = sum_i w_i ||g_i||, the size of what was summed (its own
norm may cancel to nothing). Each g_i carries the rounding of one float32 backward, some 1e-7 to 1e-6; 1e-5 is the
issue's figure. The naive mean of means is off by several tenths.
"""

from __future__ import annotations

import copy

import pytest
import torch

from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from tests.cases import Case, big_batch_loss, stream_of, tiny_gpt

# 100 samples in windows of 16: window 6 is short (4 samples, 12 filler rows), window 7 opens the second epoch.
SHORT = Case(accumulation_steps=4, micro_batch=4, padded=True, last_window="short", clipping=0.0)
WINDOWS = [0, 6, 7]


def deepspeed_gradient(engine: WindowEngine, case: Case, ranks: Ranks, window: int) -> dict[str, torch.Tensor]:
    """What the optimizer is about to see: caught at the boundary, when reduction is done and clipping off."""
    caught: dict[str, torch.Tensor] = {}

    def catch(*_: object) -> None:
        caught.update({name: p.grad.clone() for name, p in engine.engine.module.named_parameters()})

    handle = engine.engine.optimizer.register_step_pre_hook(catch)
    micro_batches = stream_of(case, ranks).window(window)
    targets = sum(engine.loss.count(micro_batch) for micro_batch in micro_batches)
    engine.run_window(micro_batches, targets)
    handle.remove()
    return caught


def truth(model: torch.nn.Module, case: Case, window: int) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model).double()
    big_batch_loss(model, case, window).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def sizes(model: torch.nn.Module, case: Case, ranks: Ranks, window: int) -> dict[str, float]:
    """S of each parameter: the sum of the norms of its weighted micro-batch gradients."""
    loss = CausalLMLoss()
    micro_batches = stream_of(case, ranks).window(window)
    targets = sum(loss.count(micro_batch) for micro_batch in micro_batches)
    total = dict.fromkeys((name for name, _ in model.named_parameters()), 0.0)
    for micro_batch in micro_batches:
        model.zero_grad()
        outputs = model(input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"])
        (loss.sum(outputs, micro_batch) / targets).backward()
        for name, parameter in model.named_parameters():
            total[name] += float(parameter.grad.norm())
    model.zero_grad()
    return total


def worst_error(found: dict, expected: dict, size: dict[str, float]) -> float:
    largest = max(size.values())
    return max(float((found[n].double() - expected[n]).norm()) / max(size[n], 1e-6 * largest) for n in expected)


@pytest.mark.parametrize("window", WINDOWS)
def test_gradient_equals_the_big_batch(one_rank: Ranks, window: int) -> None:
    engine = WindowEngine(tiny_gpt(), SHORT.config, SHORT.batch, CausalLMLoss())
    expected = truth(tiny_gpt(), SHORT, window)
    size = sizes(tiny_gpt(), SHORT, one_rank, window)
    assert worst_error(deepspeed_gradient(engine, SHORT, one_rank, window), expected, size) < 1e-5
    engine.engine.destroy()


def test_windows_after_a_short_one_start_clean(one_rank: Ranks) -> None:
    """The same engine goes through 6 (short) and 7 in turn: nothing leaks, no boundary moves."""
    engine = WindowEngine(tiny_gpt(), SHORT.config, SHORT.batch, CausalLMLoss())
    for window in (6, 7):
        before = copy.deepcopy(engine.engine.module)
        found = deepspeed_gradient(engine, SHORT, one_rank, window)
        size = sizes(copy.deepcopy(before), SHORT, one_rank, window)
        assert worst_error(found, truth(before, SHORT, window), size) < 1e-5
    assert (engine.engine.global_steps, engine.engine.micro_steps) == (2, 8)
    engine.engine.destroy()


@pytest.mark.parametrize("window", WINDOWS)
def test_mean_of_means_is_not_the_big_batch(one_rank: Ranks, window: int) -> None:
    """Control: each micro-batch's own mean, averaged over N, as most loops have it."""
    model, loss = tiny_gpt(), CausalLMLoss()
    for micro_batch in stream_of(SHORT, one_rank).window(window):
        count = max(1, loss.count(micro_batch))
        outputs = model(input_ids=micro_batch["input_ids"], attention_mask=micro_batch["attention_mask"])
        (loss.sum(outputs, micro_batch) / count / SHORT.accumulation_steps).backward()
    naive = {name: p.grad for name, p in model.named_parameters()}
    size = sizes(tiny_gpt(), SHORT, one_rank, window)
    assert worst_error(naive, truth(tiny_gpt(), SHORT, window), size) > 1e-2
