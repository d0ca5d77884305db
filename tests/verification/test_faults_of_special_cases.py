"""Faults that need more than a plain config and model: dropout, a short window, a frozen or an unused parameter, ties.

Run: pytest -n 0 tests/verification/test_faults_of_special_cases.py (half a minute). Each is caught and called
by its name, and the same case without it is equivalent. That the matrix's own cases show them all is in
test_faults_named.py. Not covered: ranks that share masks though their generators' states differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsaccum.config.errors import ConfigError
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import VerifyRecord
from tests.verification.verifying import ADAMW, MODELS, Given, found

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow
HERE = Path(__file__).parent
ODD_FAULTS, ODD_MODELS = HERE / "odd_faults.py", HERE / "odd_models.py"
DROPOUT = {"model": {"architecture": "gpt2", "config": {**MODELS["gpt2"], "resid_pdrop": 0.1}}}


def causes(record: VerifyRecord) -> list[tuple[str, str]]:
    assert record.verdict == "not_equivalent", found(record)
    return [(cause.id, cause.confidence) for cause in record.causes]


def is_right(record: VerifyRecord) -> None:
    assert record.verdict == "equivalent", found(record)


def model(name: str) -> dict[str, Any]:
    return {"model": {"factory": f"{ODD_MODELS}:{name}"}}


def test_ranks_that_are_seeded_alike_are_named(rank_pool: RankPools, tmp_path: Path) -> None:
    given = Given(ranks=2, experiment=DROPOUT)
    record = given.verify(tmp_path, rank_pool, fault="same-seed-on-every-rank")
    assert causes(record) == [("same-seed-on-every-rank", "certain")]
    assert record.claims.which("fail") == ["samples"]
    is_right(given.verify(tmp_path, rank_pool))


def test_a_loop_that_seeds_every_micro_step_alike_is_named(rank_pool: RankPools, tmp_path: Path) -> None:
    given = Given(ranks=2, experiment=DROPOUT)
    loop = f"{HERE / 'odd_loops.py'}:seeds_every_micro_step"
    assert causes(given.verify(tmp_path, rank_pool, loop=loop)) == [("same-seed-on-every-rank", "certain")]


def test_without_dropout_no_seed_is_wrong(rank_pool: RankPools, tmp_path: Path) -> None:
    given = Given(ranks=2)
    is_right(given.verify(tmp_path, rank_pool, loop=f"{HERE / 'odd_loops.py'}:seeds_every_micro_step"))
    with pytest.raises(ConfigError, match="no dropout"):
        given.verify(tmp_path, rank_pool, fault="same-seed-on-every-rank")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=SLOW)])
def test_the_plain_loop_divides_a_short_window_by_all_of_a_full_one(
    rank_pool: RankPools, tmp_path: Path, ranks: int
) -> None:
    """Rows of equal length: the mean of means is right in every window but the short one. Nothing is injected."""
    given = Given(ranks=ranks, rows=1, micro_steps=4, packed_last_window="short")
    record = given.verify(tmp_path, rank_pool, loop="outside-loss")
    assert causes(record) == [("short-window-full-divisor", "certain")], found(record)
    is_right(given.verify(tmp_path, rank_pool))


def test_what_is_written_to_a_frozen_parameter_is_seen(rank_pool: RankPools, tmp_path: Path) -> None:
    given = Given(experiment=model("frozen"))
    is_right(given.verify(tmp_path, rank_pool))
    in_the_step = given.verify(tmp_path, rank_pool, fault=f"{ODD_FAULTS}:writes_to_the_frozen_in_the_step")
    after_it = Given().verify(tmp_path, rank_pool, fault="frozen-parameter-changed")
    for record in (in_the_step, after_it):
        assert causes(record) == [("frozen-parameter-changed", "certain")], found(record)


def test_a_parameter_without_gradient_is_right_where_nothing_decays(rank_pool: RankPools, tmp_path: Path) -> None:
    without_decay = {**ADAMW, "params": {**ADAMW["params"], "weight_decay": 0.0}}
    is_right(Given(optimizer=without_decay, experiment=model("unused")).verify(tmp_path, rank_pool))
    record = Given(experiment=model("unused")).verify(tmp_path, rank_pool)
    assert causes(record) == [("absent-gradient-decayed", "certain")]
    with pytest.raises(ConfigError, match="nothing decays"):
        Given(optimizer=without_decay).verify(tmp_path, rank_pool, fault="absent-gradient-decayed")


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=SLOW)])
def test_a_split_tie_is_named_beside_another_fault(rank_pool: RankPools, tmp_path: Path, stage: int) -> None:
    """The gradients of both copies are put together, so that the weights of the micro-batches still show."""
    record = Given(stage=stage).verify(tmp_path, rank_pool, fault="tied-weights-split+loss-not-scaled")
    assert set(causes(record)) == {("tied-weights-split", "certain"), ("loss-not-scaled", "certain")}, found(record)
    with pytest.raises(ConfigError, match="ties no weights"):
        Given(architecture="llama").verify(tmp_path, rank_pool, fault="tied-weights-split")


@pytest.mark.parametrize(
    ("micro_steps", "ranks"), [(2, 1), pytest.param(8, 1, marks=SLOW), pytest.param(3, 2, marks=SLOW)]
)
def test_a_sum_in_bf16_is_told_from_other_errors(
    rank_pool: RankPools, tmp_path: Path, micro_steps: int, ranks: int
) -> None:
    given = Given(ranks=ranks, micro_steps=micro_steps, ragged=True)
    record = given.verify(tmp_path, rank_pool, fault="low-precision-accumulation")
    assert causes(record) == [("low-precision-accumulation", "certain")], found(record)
    assert record.causes[0].evidence["accumulated_in"] == "bf16"
    assert 1e-4 < record.causes[0].evidence["relative_loss"] < 1e-2
    noise = given.verify(tmp_path, rank_pool, fault=f"{ODD_FAULTS}:adds_small_noise")
    assert [cause.id for cause in noise.causes] == ["unknown-difference"], found(noise)
