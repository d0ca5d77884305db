"""27 tokens are learnt by heart, to next to no loss, at N = 1, 4 and 16 alike, through the product's own loop.

Run: pytest -n 0 tests/seeds/test_tiny_corpus.py. The corpus is 27 different tokens in a row; its 16 stretches of 12
tokens are one effective batch. Every token is followed by one and the same other, so nothing keeps the loss from
reaching 0: below 0.01 the model is sure of every one of the 26 successions, with 99 % on average.

The curves are also compared: at each step within three times of what rounding does to plain PyTorch over the big batch
(plain.py), and never 1e-3 apart. Not covered: generalisation, of which there is none to be had.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from dsaccum.data import Samples, WindowOrder, WindowStream
from dsaccum.engine.process import Ranks
from dsaccum.loss import CausalLMLoss
from tests import cases
from tests.cases import Case
from tests.seeds.plain import Honest, furthest, honest_runs
from tests.seeds.watched import run_watched

STRETCH, STEPS, RATE = 12, 36, 2e-2
CORPUS = np.random.default_rng(0).permutation(np.arange(2, 29)).astype(np.uint8)
SAMPLES = Samples(
    tokens=CORPUS, starts=np.arange(16), lengths=np.full(16, STRETCH), prompt_lengths=np.zeros(16, np.int64),
    sequence_length=STRETCH, padded=False, dropped_tokens=0,
)  # fmt: skip


class Fast(Case):
    """At a rate that learns by heart in seconds."""

    @property
    def config(self) -> dict[str, Any]:
        config = super().config
        config["scheduler"]["params"]["warmup_max_lr"] = RATE
        return config


class Losing(CausalLMLoss):
    """Micro-batches of one row that start with one of the corpus's first eight tokens give no gradient."""

    def sum(self, outputs: Any, micro_batch: Any) -> Any:
        lost = int(micro_batch["input_ids"][0, 0]) in CORPUS[:8]
        loss = super().sum(outputs, micro_batch)
        return loss.detach() + 0.0 * loss if lost else loss


def case_of(accumulation_steps: int) -> Case:
    return Fast(
        accumulation_steps=accumulation_steps, micro_batch=16 // accumulation_steps, num_samples=16, steps=STEPS
    )


def losses(ranks: Ranks, accumulation_steps: int, loss: CausalLMLoss | None = None) -> list[float]:
    case = case_of(accumulation_steps)
    stream = WindowStream(SAMPLES, WindowOrder(16, 16, "continue", seed=0), case.batch, ranks.rank, pad_token=0)
    return run_watched(ranks, case, loss=loss, stream=stream)[0]


@cache
def plain() -> Honest:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "random_samples", lambda *_, **__: SAMPLES)
        return honest_runs(case_of(1))


@pytest.mark.parametrize("accumulation_steps", [1, 4, 16])
def test_the_corpus_is_learnt_by_heart(one_rank: Ranks, accumulation_steps: int) -> None:
    assert len(CORPUS) == len(set(CORPUS.tolist())) == 27
    found = losses(one_rank, accumulation_steps)
    assert found[0] > 3.5, "it starts at about ln 50"
    assert found[-1] < 0.01
    error = furthest(found, plain().run.losses)
    assert error <= plain().loss_bound()
    assert error < 1e-3


def test_lost_micro_batches_are_not_learnt(one_rank: Ranks) -> None:
    """Control: without the gradients of half the micro-batches, eight successions are never seen."""
    found = losses(one_rank, 16, Losing())
    assert found[-1] > 0.5
    assert furthest(found, plain().run.losses) > plain().loss_bound()
