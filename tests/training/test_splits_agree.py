"""Every split of an effective batch trains the same model: losses step by step, on packed and on ragged data.

Run: pytest tests/training/test_splits_agree.py. Not covered: real text and the shipped configs (tests/configs).

Bound: float32 rounds each number to 2**-24 = 6e-8 of itself; a loss is a mean of ~200 token losses of like size, whose
summation order differs between splits, and 20 AdamW steps carry differences on. 2e-6 relative is 34 roundings; measured
are at most 1.5e-7. A wrong weighting is off by 1e-2 and more, as the controls show.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dsaccum.engine.process import Ranks
from tests.cases import Case, Result, run_dsaccum, run_plain
from tests.ranks import run_on_ranks

ONE_RANK = [(1, 16, 0), (4, 4, 0), (16, 1, 0), (4, 4, 1), (4, 4, 2), (4, 4, 3)]
TWO_RANKS = [(1, 8, 0), (4, 2, 0), (8, 1, 0), (4, 2, 1), (4, 2, 2), (4, 2, 3)]


def losses_of(result: Result) -> list[float]:
    return [metrics.loss for metrics in result.metrics]


def furthest(ours: list[float], truth: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, truth, strict=True))


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "ragged"])
@pytest.mark.parametrize(("steps", "rows", "stage"), ONE_RANK)
def test_one_rank_matches_plain_pytorch(one_rank: Ranks, steps: int, rows: int, stage: int, padded: bool) -> None:
    case = Case(accumulation_steps=steps, micro_batch=rows, stage=stage, padded=padded)
    assert furthest(losses_of(run_dsaccum(one_rank, case)), run_plain(case)) < 2e-6


def several(ranks: Ranks, cases: list[Case]) -> list[Result]:
    return [run_dsaccum(ranks, case) for case in cases]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "ragged"])
def test_two_ranks_match_plain_pytorch(tmp_path: Path, padded: bool) -> None:
    cases = [
        Case(world_size=2, accumulation_steps=steps, micro_batch=rows, stage=stage, padded=padded)
        for steps, rows, stage in TWO_RANKS
    ]
    by_rank = run_on_ranks(several, 2, tmp_path, cases)
    for case, first, second in zip(cases, *by_rank, strict=True):
        assert furthest(losses_of(first), run_plain(case)) < 2e-6, case
        assert losses_of(first) == losses_of(second), "both ranks know the same loss, to the bit"


def test_another_order_of_samples_is_noticed(one_rank: Ranks) -> None:
    """Control: the comparison fails when the samples differ."""
    case = Case(accumulation_steps=4, micro_batch=4)
    assert furthest(losses_of(run_dsaccum(one_rank, case)), run_plain(replace(case, num_samples=99))) > 1e-3


def test_mean_of_means_is_noticed(one_rank: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: micro-batches weighed alike, as most loops do, drift off on ragged data within 20 steps."""
    case = Case(accumulation_steps=16, micro_batch=1, padded=True)

    def own_mean(self, outputs, micro_batch):  # S_k / n_k * T / N: what dividing by each one's own count comes to
        n = self.count(micro_batch)
        return original(self, outputs, micro_batch) / n * mean_count

    from dsaccum.loss import CausalLMLoss
    from tests.cases import stream_of

    original = CausalLMLoss.sum
    window = stream_of(case, one_rank).window(0)
    mean_count = sum(CausalLMLoss().count(micro_batch) for micro_batch in window) / 16
    truth = run_plain(case)
    monkeypatch.setattr(CausalLMLoss, "sum", own_mean)
    wrong = run_dsaccum(one_rank, case)
    assert furthest(losses_of(wrong), truth) > 1e-2
