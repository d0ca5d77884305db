"""Loops of users that do something of their own: right ones are equivalent, wrong ones are wrong for what they do.

Run: pytest -m slow -n 0 tests/verification/test_odd_loops.py (a minute on two idle cores). Every wrong loop here
differs from ``sound``, which is right, in one statement.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsaccum.config.errors import ConfigError
from dsaccum.verification.ranks.failed import RankFailed
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import VerifyRecord
from tests.verification.verifying import Given, found

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
LOOPS = Path(__file__).with_name("odd_loops.py")


def run(folder: Path, pools: RankPools, loop: str, **given: Any) -> VerifyRecord:
    return Given(**given).verify(folder, pools, loop=f"{LOOPS}:{loop}")


def causes(record: VerifyRecord) -> list[tuple[str, str]]:
    return [(cause.id, cause.confidence) for cause in record.causes]


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loop", ["sound", "changes_its_batch"])
def test_right_loops_are_equivalent(rank_pool: RankPools, tmp_path: Path, loop: str, stage: int) -> None:
    record = run(tmp_path, rank_pool, loop, stage=stage)
    assert record.verdict == "equivalent", found(record)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_loop_that_weighs_by_the_window_s_targets_is_right_on_ragged_rows(
    rank_pool: RankPools, tmp_path: Path, ranks: int
) -> None:
    record = run(tmp_path, rank_pool, "weighs_by_the_window", ragged=True, ranks=ranks, last_window="continue")
    assert record.verdict == "equivalent", found(record)
    wrong = run(tmp_path, rank_pool, "sound", ragged=True, ranks=ranks, last_window="continue")
    assert causes(wrong) == [("mean-of-means", "certain")], found(wrong)


def test_losses_kept_after_their_backward_hold_no_activations(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run(tmp_path, rank_pool, "keeps_losses")
    assert record.verdict == "equivalent", found(record)
    kept = run(tmp_path, rank_pool, "keeps_logits")
    assert causes(kept) == [("activations-kept", "certain")], found(kept)


def test_a_loop_may_trim_and_split_its_rows(rank_pool: RankPools, tmp_path: Path) -> None:
    """Equal counts in every micro-batch, since a loop's function sees one micro-batch alone: one row each."""
    record = run(tmp_path, rank_pool, "trims_and_splits", rows=3)
    assert record.verdict == "equivalent", found(record)


def test_the_optimizer_stepped_past_the_engine(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run(tmp_path, rank_pool, "steps_the_optimizer")
    assert causes(record) == [("step-inside-window", "certain")], found(record)
    assert record.causes[0].evidence["optimizer_stepped_after_micro_steps"] == [0, 1, 3]


def test_one_parameter_s_gradient_is_cleared_inside_the_window(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run(tmp_path, rank_pool, "clears_one_gradient")
    assert causes(record) == [("parameter-gradient-lost", "certain")], found(record)


def test_a_lost_tensor_is_named_beside_wrong_weights(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run(tmp_path, rank_pool, "multiplies_and_clears_one")
    assert {cause.id for cause in record.causes} == {"loss-not-scaled", "parameter-gradient-lost"}, found(record)
    [lost] = [cause for cause in record.causes if cause.id == "parameter-gradient-lost"]
    assert len(lost.evidence["parameters"]) == 1


def test_all_gradients_cleared_inside_the_window_are_one_cause(rank_pool: RankPools, tmp_path: Path) -> None:
    """No gradient buffer stands in the next forward, either: memory fails for the same reason."""
    record = run(tmp_path, rank_pool, "clears_all_gradients")
    assert causes(record) == [("only-last-micro-batch", "certain")], found(record)


@pytest.mark.parametrize(
    ("loop", "problem"),
    [
        ("returns_no_graph", "it returned a loss without a graph"),
        ("returns_logits", "it returned a tensor of shape [2, 32,"),
    ],
)
def test_a_loop_that_returns_no_loss_is_a_mistake(
    rank_pool: RankPools, tmp_path: Path, loop: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, rank_pool, loop)
    assert f'--loop = "{LOOPS}:{loop}": {problem}' in str(caught.value)


def test_a_loop_that_raises_is_named_with_its_line(rank_pool: RankPools, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"forward: KeyError: 'input' \(at odd_loops\.py:\d+ in mistypes\)"):
        run(tmp_path, rank_pool, "mistypes")


@pytest.mark.parametrize("loop", ["shrinks_a_parameter", pytest.param("forgets_a_state", marks=pytest.mark.slow)])
def test_what_is_changed_between_windows_fails_the_update(rank_pool: RankPools, tmp_path: Path, loop: str) -> None:
    """Each step by itself is right: only what the step before left tells."""
    record = run(tmp_path, rank_pool, loop)
    assert record.claims.which("fail") == ["update"], found(record)
    assert "changed between windows" in record.reasons["update"]
    assert causes(record) == [("unknown-difference", "ambiguous")]
    assert record.causes[0].evidence["failed"]["update"] == record.reasons["update"]


def test_a_gradient_that_is_zero_proves_nothing(rank_pool: RankPools, tmp_path: Path) -> None:
    factory = tmp_path / "losses.py"
    factory.write_text(
        "from dsaccum.loss import CausalLMLoss\n"
        "class Nothing(CausalLMLoss):\n"
        "    def sum(self, outputs, micro_batch): return 0 * super().sum(outputs, micro_batch)\n"
    )
    record = Given(experiment={"loss": {"factory": f"{factory}:Nothing"}}).verify(tmp_path, rank_pool)
    assert record.verdict is None, found(record)
    assert "the right gradient is zero" in record.reasons["gradient"]
