"""Every known fault, put in on real ranks through the whole of ``dsaccum.verify``, is found and called by its name.

Run: pytest -n 0 tests/verification/test_faults_named.py for half of the faults, once each (a minute on two idle cores);
with ``-m slow`` for all, and at every ZeRO stage, on packed and on ragged rows. W = 2 and N = 3: where N = W, different
faults look alike.

Named means: one cause, the fault's own, and certain; where two faults do the very same, a tie that has it. The negative
control is test_equivalent.py, where the same cases without a fault are equivalent. Not covered: what the faults do in
detail (test_faults.py and its neighbours), two faults at once (test_two_faults.py), and the two of fp16's loss scale
(test_loss_scale.py), which no CPU has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsaccum.config.errors import ConfigError
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.subject.faults import FAULTS
from tests.verification.verifying import MODELS, Given, found

pytestmark = pytest.mark.distributed
LIMIT = 0.1
"""Below every norm, so that clipping acts."""
WHERE: dict[str, tuple[int, bool]] = {
    "loss-not-scaled": (3, False),
    "loss-scaled-twice": (1, True),
    "only-last-micro-batch": (2, False),
    "micro-batch-dropped": (3, True),
    "ranks-summed": (1, False),
    "step-inside-window": (2, True),
    "boundary-shifted": (1, True),
    "stale-gradients": (2, True),
    "ranks-start-apart": (0, False),
    "ranks-drift-apart": (2, False),
    "ranks-share-data": (3, True),
    "samples-misplaced": (1, False),
    "fields-misaligned": (2, True),
    "rank-mean-of-means": (3, True),
    "targets-counted-before-shift": (1, False),
    "clipping-mismatch": (3, False),
    "schedule-per-micro-step": (2, False),
    "schedule-offset": (1, True),
    "rate-mismatch": (3, True),
    "optimizer-count-offset": (3, False),
    "parameter-gradient-lost": (1, True),
    "randomness-active": (2, False),
    "activations-kept": (1, False),
    "loss-not-additive": (3, True),
    "non-finite-gradient": (2, True),
    "low-precision-accumulation": (2, False),
    "short-window-full-divisor": (1, True),
    "same-seed-on-every-rank": (3, False),
    "frozen-parameter-changed": (3, True),
    "absent-gradient-decayed": (2, True),
    "tied-weights-split": (1, False),
}
"""ZeRO stage, and whether rows are ragged, for the one run of each fault; ZeRO 0 and ragged rows if it isn't named."""


DROPOUT = {"architecture": "gpt2", "config": {**MODELS["gpt2"], "resid_pdrop": 0.1}}
ON_A_CPU = [fault for fault in FAULTS if not fault.startswith("loss-scale-not")]


def given(stage: int, *, ragged: bool, micro_steps: int = 3) -> Given:
    experiment = {"model": DROPOUT}
    return Given(ranks=2, micro_steps=micro_steps, stage=stage, ragged=ragged, clipping=LIMIT, experiment=experiment)


def is_named(identifier: str, case: Given, folder: Path, pools: RankPools) -> None:
    record = case.verify(folder, pools, fault=identifier)
    assert record.verdict == "not_equivalent", found(record)
    assert record.fault == identifier
    causes = {cause.id: cause.confidence for cause in record.causes}
    if set(causes.values()) == {"ambiguous"}:
        assert identifier in causes, found(record)
    else:
        assert causes == {identifier: "certain"}, found(record)
    assert all(cause.summary and cause.fix for cause in record.causes)


IN_CI = {
    "loss-not-scaled", "loss-scaled-twice", "micro-batch-dropped", "ranks-not-reduced", "ranks-averaged-twice",
    "mean-of-means", "rank-mean-of-means", "step-inside-window", "stale-gradients", "ranks-share-data",
    "clipped-every-micro-step", "schedule-per-micro-step", "optimizer-count-offset", "parameter-gradient-lost",
    "activations-kept", "reduced-every-micro-step", "short-window-full-divisor", "frozen-parameter-changed",
}  # fmt: skip
"""At least one of each kind."""


@pytest.mark.parametrize(
    "identifier", [pytest.param(fault, marks=[] if fault in IN_CI else [pytest.mark.slow]) for fault in ON_A_CPU]
)
def test_each_fault_is_called_by_its_name(rank_pool: RankPools, tmp_path: Path, identifier: str) -> None:
    stage, ragged = WHERE.get(identifier, (0, True))
    is_named(identifier, given(stage, ragged=ragged), tmp_path, rank_pool)


@pytest.mark.parametrize("identifier", ["loss-scaled-twice", "rank-mean-of-means"])
def test_with_another_number_of_micro_steps(rank_pool: RankPools, tmp_path: Path, identifier: str) -> None:
    is_named(identifier, given(0, ragged=True, micro_steps=4), tmp_path, rank_pool)


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True], ids=["packed", "ragged"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("identifier", ON_A_CPU)
def test_each_fault_at_each_stage(
    rank_pool: RankPools, tmp_path: Path, identifier: str, stage: int, *, ragged: bool
) -> None:
    case = given(stage, ragged=ragged)
    try:
        is_named(identifier, case, tmp_path, rank_pool)
    except ConfigError as refusal:
        if "cannot show itself here" not in str(refusal):
            raise
        assert WHERE.get(identifier, (0, True)) != (stage, ragged)
        pytest.skip(str(refusal))


def test_places_are_those_of_faults_that_there_are() -> None:
    unknown: set[Any] = (WHERE.keys() | IN_CI) - FAULTS.keys()
    assert unknown == set()
