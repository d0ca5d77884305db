"""Two faults at once: both are named, or one of them, or none; never a third one as a certainty.

Run: pytest -n 0 -m slow tests/verification/test_two_faults.py (a minute on two idle cores). W = 1, N = 3, ragged rows.
Known pairs that undo each other are left out: together they are no fault. Not covered: three at once; pairs on several
ranks.
"""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest
import torch

from dsaccum.power.matrix import EXTENT
from dsaccum.power.settings import Setting
from dsaccum.power.small_case import write_case
from dsaccum.verification.cases.inputs import PreparedCase, read_case
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.progress import SilentProgress
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import Cause
from dsaccum.verification.subject.faults import FAULTS, fault_of
from dsaccum.verification.verify import examine, with_fault
from tests.verification.planting import make_case

pytestmark = pytest.mark.distributed
SETTING = Setting(ranks=1, accumulation_steps=3, zero_stage=0, packing="ragged")
PAIRS, SEED = 30, 4
UNDO_EACH_OTHER = {frozenset({"loss-not-scaled", "loss-scaled-twice"})}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedCase:
    return read_case(write_case(tmp_path_factory.mktemp("pairs"), SETTING))


def causes(prepared: PreparedCase, pools: RankPools, *faults: str) -> list[Cause]:
    case = with_fault(prepared, "+".join(faults))
    return examine(case, pools.get(SETTING.ranks), SilentProgress(), EXTENT).causes


@pytest.mark.slow
@pytest.mark.parametrize("other", ["loss-scaled-twice", "ranks-averaged-twice", "ranks-summed"])
def test_on_two_ranks_cleared_gradients_are_no_dropped_micro_batches(
    tmp_path: Path, rank_pool: RankPools, other: str
) -> None:
    """One micro-step is left, and with it one number: the other mistake is named, but never as a certainty."""
    setting = Setting(ranks=2, accumulation_steps=3, zero_stage=0, packing="packed")
    case = with_fault(read_case(write_case(tmp_path, setting)), f"only-last-micro-batch+{other}")
    found = examine(case, rank_pool.get(2), SilentProgress(), EXTENT).causes
    assert {(cause.id, cause.confidence) for cause in found} == {
        (other, "ambiguous"),
        ("only-last-micro-batch", "ambiguous"),
    }


def test_both_are_given_their_windows() -> None:
    """One remembers what it is fed, the other feeds something else: in either order both are asked."""
    case = make_case(ranks=2)
    for pair in ("targets-counted-before-shift+ranks-share-data", "ranks-share-data+targets-counted-before-shift"):
        windows = fault_of(pair).feed(case_stream(case, 1), case, 1)
        assert torch.equal(windows.window(0)[0]["input_ids"], case_stream(case, 0).window(0)[0]["input_ids"])
        assert len(FAULTS["targets-counted-before-shift"].factors) == case.batch.accumulation_steps  # type: ignore[attr-defined]
        FAULTS["targets-counted-before-shift"].factors.clear()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_no_pair_gets_one_wrong_name(prepared: PreparedCase, rank_pool: RankPools) -> None:
    fit = [identifier for identifier, fault in FAULTS.items() if not fault.inapplicable(prepared.case, prepared.model)]
    pairs = [pair for pair in combinations(fit, 2) if frozenset(pair) not in UNDO_EACH_OTHER]
    for pair in random.Random(SEED).sample(pairs, PAIRS):
        found = causes(prepared, rank_pool, *pair)
        assert found, f"{pair}: not caught"
        certain = {cause.id for cause in found if cause.confidence == "certain"}
        assert certain <= set(pair), f"{pair}: {[(cause.id, cause.confidence) for cause in found]}"


@pytest.mark.parametrize(
    "pair",
    [
        ("loss-scaled-twice", "padding-counted"),
        ("loss-scaled-twice", "micro-batch-dropped"),
        ("mean-of-means", "micro-batch-dropped"),
        ("parameter-gradient-lost", "schedule-offset"),
    ],
)
def test_these_are_both_named(prepared: PreparedCase, rank_pool: RankPools, pair: tuple[str, str]) -> None:
    found = causes(prepared, rank_pool, *pair)
    assert {(cause.id, cause.confidence) for cause in found} == {(fault, "certain") for fault in pair}
