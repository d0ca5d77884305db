"""Mistakes that a tester made who had not seen the code: each is named for what it is, or said not to be known.

Run: pytest -m slow -n 0 tests/verification/test_blind.py (a minute on two idle cores). The same cases without a
mistake are right. The faults of the table are tests/verification/test_faults_named.py's.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsaccum.verification.comparison.sample_check import check_samples
from dsaccum.verification.diagnosis.judge import told_apart
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import Cause, VerifyRecord
from dsaccum.verification.subject.capture import WindowCapture
from tests.verification.verifying import Given, found

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
FAULTS, LOOPS = (Path(__file__).with_name(name) for name in ("blind_faults.py", "blind_loops.py"))


def run(folder: Path, pools: RankPools, fault: str | None, **given: Any) -> VerifyRecord:
    return Given(**given).verify(folder, pools, fault=f"{FAULTS}:{fault}" if fault else None)


def run_loop(folder: Path, pools: RankPools, loop: str, **given: Any) -> VerifyRecord:
    return Given(**given).verify(folder, pools, loop=f"{LOOPS}:{loop}")


def unknown(record: VerifyRecord) -> Cause:
    assert [cause.id for cause in record.causes] == ["unknown-difference"], found(record)
    return record.causes[0]


def only_cause(record: VerifyRecord, identifier: str) -> Cause:
    assert [(cause.id, cause.confidence) for cause in record.causes] == [(identifier, "certain")], found(record)
    return record.causes[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_mistake_the_case_is_right(rank_pool: RankPools, tmp_path: Path, ranks: int) -> None:
    record = run(tmp_path, rank_pool, None, ranks=ranks)
    assert record.verdict == "equivalent", found(record)


# One tensor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "parameter"), [("leaves_last_out", "ln_f.bias"), ("leaves_first_out", "wte.weight")])
def test_a_tensor_left_out_of_the_reduction(rank_pool: RankPools, tmp_path: Path, fault: str, parameter: str) -> None:
    """Of a clipped window the ranks' norms differ, and so do their parameters after it: both follow from it."""
    record = run(tmp_path, rank_pool, fault, ranks=2, clipping=0.1)
    cause = only_cause(record, "ranks-not-reduced")
    assert list(cause.evidence["parameters"]) == [f"transformer.{parameter}"]
    assert f"transformer.{parameter}" in cause.summary
    assert "all-reduce" in cause.fix


def test_a_left_over_in_one_tensor(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run(tmp_path, rank_pool, "keeps_one_gradient")
    cause = only_cause(record, "stale-gradients")
    assert list(cause.evidence["parameters"]) == ["transformer.ln_f.bias"]
    assert cause.evidence["step"] == 2


@pytest.mark.parametrize(
    ("fault", "said", "fix"),
    [
        ("loses_two_micro_steps_of_one", "micro-steps 1, 2 missing", "zero_grad()"),
        ("halves_one", "0.5 of what is due", "multiplies"),
        ("turns_one_around", "no share of it", "not lost"),
    ],
)
def test_a_tensor_that_is_wrong_is_said_to_be_wrong_in_its_way(
    rank_pool: RankPools, tmp_path: Path, fault: str, said: str, fix: str
) -> None:
    cause = only_cause(run(tmp_path, rank_pool, fault), "parameter-gradient-lost")
    assert said in cause.summary
    assert fix in cause.fix
    assert list(cause.evidence["parameters"]) == ["transformer.h.0.attn.c_attn.weight"]


# What reaches the model ---------------------------------------------------------------------------------------------


def test_another_micro_batch_handed_on_by_the_loop(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run_loop(tmp_path, rank_pool, "hands_on_the_one_before")
    cause = only_cause(record, "samples-misplaced")
    assert (cause.evidence["step"], cause.evidence["rank"], cause.evidence["micro_step"]) == (1, 0, 2)
    assert "step 1, rank 0, micro-step 2: the loop handed the model another place's rows" in record.reasons["samples"]


def test_rows_that_the_loop_cuts(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run_loop(tmp_path, rank_pool, "cuts_rows")
    assert "rows that end before their last target" in record.reasons["samples"]
    cause = unknown(record)
    assert cause.fix.startswith("the loop's loss is not the experiment's")
    assert "what the loop does to the rows" in cause.fix


def test_columns_without_a_target_may_be_left_out_beside_another_mistake(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run_loop(tmp_path, rank_pool, "drops_the_last_column")
    assert record.claims.samples == "pass", found(record)
    assert record.claims.gradient == "fail"


def test_other_targets_are_seen_in_the_loss(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run_loop(tmp_path, rank_pool, "hides_spaces")
    assert record.claims.samples == "pass"
    cause = unknown(record)
    assert cause.fix.startswith("the loop's loss is not the experiment's (step 1: ")
    assert cause.fix.endswith("run it with --loop dsaccum to see whether the loop or the config is at fault")


def test_parameters_moved_by_the_loop(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run_loop(tmp_path, rank_pool, "decays_by_hand")
    assert "outside the optimizer" in unknown(record).fix


def test_two_losses_are_told_with_as_many_digits_as_it_takes() -> None:
    step: Any = SimpleNamespace(loss=5.9090612, truth=SimpleNamespace(loss=5.9090641))
    assert told_apart(step) == "5.909061 was logged, 5.909064 is right"
    far: Any = SimpleNamespace(loss=2.5, truth=SimpleNamespace(loss=5.9090641))
    assert told_apart(far) == "2.5 was logged, 5.90906 is right"


def _given(*at: tuple[int, list[list[int]]]) -> WindowCapture:
    due = [batch for [batch] in DUE]
    inputs = [torch.tensor(rows) for _, rows in at]
    return WindowCapture(1, micro_batches=due, inputs=inputs, inputs_at=[step for step, _ in at])


def _batch(*rows: list[int]) -> dict[str, torch.Tensor]:
    """0 fills rows up and is no target."""
    tokens = torch.tensor(rows)
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}


DUE = [[_batch([1, 2, 3, 4], [5, 6, 0, 0])], [_batch([7, 8, 9, 1], [2, 4, 6, 8])]]
FIRST, SECOND = [[1, 2, 3, 4], [5, 6, 0, 0]], [[7, 8, 9, 1], [2, 4, 6, 8]]


@pytest.mark.parametrize(
    "forwards",
    [
        [(1, FIRST), (2, SECOND)],
        [(1, [[1, 2, 3], [5, 6, 0]]), (2, [[7, 8, 9], [2, 4, 6]])],  # without the last column
        [(1, [[1, 2, 3, 4, 0, 0], [5, 6, 0, 0, 0, 0]]), (2, SECOND)],  # filled up further
        [(1, [[0, 1, 2, 3, 4], [0, 0, 0, 5, 6]]), (2, SECOND)],  # at the left
        [(1, [[1, 2, 3, 4]]), (1, [[5, 6]]), (2, SECOND), (2, SECOND)],  # split, repeated
        [(1, [[1, 2, 3, 4, 5, 6]]), (2, [[7, 8, 9, 1, 2, 4, 6, 8]])],  # packed
        [(1, FIRST)],  # a micro-step without forward: what it means can't be told
    ],
)
def test_what_a_loop_may_do_to_its_rows(forwards: list[Any]) -> None:
    assert check_samples([_given(*forwards)], DUE, [], ours=False) == []


@pytest.mark.parametrize(
    ("forwards", "micro_step", "kind"),
    [
        ([(1, FIRST), (2, FIRST)], 2, "another place's"),
        ([(1, [[1, 2, 3, 4]] * 2), (2, [[7, 8, 9, 1]] * 2)], 2, "missing"),
        ([(1, FIRST), (2, [[7, 8], [2, 4]])], 2, "cut"),
        ([(1, FIRST), (2, [[7, 8, 9, 1], [2, 4, 3, 8]])], 2, "forward"),
    ],
)
def test_what_a_loop_may_not_do(forwards: list[Any], micro_step: int, kind: str) -> None:
    last = check_samples([_given(*forwards)], DUE, [], ours=False)[-1]
    assert (last.micro_step, last.kind, last.handed_on) == (micro_step, kind, True)


# Clipping, precision, rates, states ----------------------------------------------------------------------------------


def test_clipping_after_each_backward_to_another_limit(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run(tmp_path, rank_pool, "clips_what_there_is")
    cause = only_cause(record, "clipped-every-micro-step")
    assert cause.evidence["limit"] == pytest.approx(0.3, rel=1e-4)


def test_gradients_rounded_while_ranks_exchange_them(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run(tmp_path, rank_pool, "rounds_for_the_ranks", ranks=2)
    cause = only_cause(record, "low-precision-accumulation")
    assert (cause.evidence["where"], cause.evidence["accumulated_in"]) == ("in communication", "bf16")


def test_a_schedule_that_moves_before_the_step(rank_pool: RankPools, tmp_path: Path) -> None:
    record = run(tmp_path, rank_pool, "schedules_before_the_step")
    cause = only_cause(record, "schedule-offset")
    assert cause.evidence["offset"] == 1
    assert "after optimizer.step()" in cause.fix
    assert record.claims.schedule == "fail"


@pytest.mark.parametrize("fault", ["loses_states_before_the_step", "loses_states_after_the_step"])
def test_lost_states_are_no_wrong_clipping(rank_pool: RankPools, tmp_path: Path, fault: str) -> None:
    record = run(tmp_path, rank_pool, fault, ranks=2, stage=1)
    assert record.claims.which("fail") == ["update"], found(record)
    assert "step 2: the optimizer's state of" in record.reasons["update"]
    fix = unknown(record).fix
    assert "optimizer.state" in fix
    assert "--loop dsaccum" not in fix
