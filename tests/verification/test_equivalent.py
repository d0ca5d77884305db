"""Right runs are found equivalent, through the whole of ``dsaccum.verify`` on real ranks: stages, precisions, data.

Run: pytest -n 0 tests/verification/test_equivalent.py (two minutes on two idle cores). Weights of fp32 are held to 1e-6
(rounding: N + W units of 6e-8 times a condition number of about 2); every other bound is the product's own. The
negative controls are the last tests: weights that are wrong by 1 %, or by the loop's nature. Not covered: what each
fault is called (test_faults_named.py), GPUs, models that are shrunk.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsaccum.config.errors import ConfigError
from dsaccum.verification.comparison import truth
from dsaccum.verification.ranks.interface import RankContext
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import VerifyRecord
from tests.verification.verifying import ADAMW, Given, found

pytestmark = pytest.mark.distributed
FUNCTIONS = {"source": "python-functions", "sequence_length": 128, "packing": "padded", "last_window": "drop"}
"""Rows with prompts, whose labels are masked."""
KEYS = {
    "schema", "verdict", "loop", "claims", "causes", "effective_batch", "truth", "substitutions", "remedies", "steps",
    "trajectory", "communication", "memory", "versions", "hardware", "command", "elapsed_s",
}  # fmt: skip
STEP_KEYS = {
    "step": None, "applied": None, "learning_rate": None,
    "loss": {"deepspeed", "big_batch", "truth"},
    "micro_batch_weights": {"expected", "recovered", "by_rank", "max_error", "tolerance", "condition"},
    "gradient": {"error", "bound", "ratio", "residual", "yardstick_error", "noise", "worst_parameter"},
    "optimizer_saw": {"error", "bound", "ratio"},
    "update": {"error", "bound", "ratio", "worst_parameter"},
    "gradient_norm": {"deepspeed", "big_batch", "clipped"},
}  # fmt: skip
TESTED = ("gradient", "clipping", "update", "loss", "schedule", "samples", "communication", "memory")


def equivalent(record: VerifyRecord) -> None:
    assert record.verdict == "equivalent", found(record)
    assert record.causes == []
    states = {claim: getattr(record.claims, claim) for claim in TESTED}
    assert set(states.values()) == {"pass"}, f"{states} {record.reasons}"
    for step in record.steps:
        assert step.gradient.error is not None
        assert step.gradient.bound is not None
        assert step.gradient.error <= step.gradient.bound
        if record.precision == "fp32":
            assert step.micro_batch_weights.max_error is not None
            assert step.micro_batch_weights.max_error < 1e-6


@pytest.mark.parametrize("ragged", [pytest.param(False, marks=pytest.mark.slow), True], ids=["packed", "ragged"])
@pytest.mark.parametrize(
    ("precision", "stage"),
    [
        ("fp32", 0),
        pytest.param("fp32", 1, marks=pytest.mark.slow),
        ("fp32", 2),
        ("fp32", 3),
        ("bf16", 0),
        pytest.param("bf16", 1, marks=pytest.mark.slow),
        ("autocast", 0),
        pytest.param("autocast", 1, marks=pytest.mark.slow),
    ],
)
def test_stages_and_precisions(
    rank_pool: RankPools, tmp_path: Path, precision: str, stage: int, *, ragged: bool
) -> None:
    record = Given(ranks=2, stage=stage, precision=precision, ragged=ragged).verify(tmp_path, rank_pool)
    equivalent(record)
    assert record.precision == {"autocast": "autocast bf16"}.get(precision, precision)
    assert (record.zero_stage, record.truth) == (stage, "float64")
    # Beside the verdict: weights stand where the claim does, and are not all equal where rows are ragged.
    due = [weight for row in record.steps[0].micro_batch_weights.expected or [] for weight in row]
    assert sum(w or 0.0 for w in due) == pytest.approx(1)
    assert (len(set(due)) > 1) == ragged
    if (precision, stage) == ("bf16", 0):
        assert record.remedies, "the verdict of bf16 at ZeRO 0 rests on one"


def test_a_short_window_is_among_them(rank_pool: RankPools, tmp_path: Path) -> None:
    """239 rows in windows of 18: the second step takes the epoch's last one, with 5: four micro-batches have none."""
    record = Given(ranks=2, rows=3, ragged=True).verify(tmp_path, rank_pool)
    equivalent(record)
    assert [step.window for step in record.steps] == [0, 13, 2]
    weights = [weight for row in record.steps[1].micro_batch_weights.expected or [] for weight in row]
    assert weights.count(0.0) == 4


@pytest.mark.parametrize(("ranks", "steps"), [(1, 1), (2, 1), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_one_rank_and_one_micro_step(rank_pool: RankPools, tmp_path: Path, ranks: int, steps: int) -> None:
    record = Given(ranks=ranks, micro_steps=steps, ragged=True).verify(tmp_path, rank_pool)
    equivalent(record)
    assert record.claims.replicas == ("pass" if ranks == 2 else "not_applicable")
    assert record.effective_batch.total == ranks * steps * 2


def test_a_limit_that_no_gradient_reaches_is_untested(rank_pool: RankPools, tmp_path: Path) -> None:
    record = Given(clipping=50.0).verify(tmp_path, rank_pool)
    assert (record.verdict, record.claims.clipping) == ("equivalent", "untested")
    assert "limit 50" in record.reasons["clipping"]
    assert Given(clipping=0.0).verify(tmp_path, rank_pool).claims.clipping == "pass"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_a_model_of_many_parameters(rank_pool: RankPools, tmp_path: Path, stage: int) -> None:
    """13 million: sums over them round a thousand times as far as those of the tiny ones do, clipping's norm first."""
    large = {"n_layer": 4, "n_embd": 512, "n_head": 8}
    model = {"model": {"architecture": "gpt2", "config": large}}
    record = Given(stage=stage, length=16, experiment=model).verify(tmp_path, rank_pool, full_size=True)
    equivalent(record)
    assert record.substitutions == [], "it is not shrunk"


def test_rows_with_prompts(rank_pool: RankPools, tmp_path: Path) -> None:
    """Labels of a prompt are masked, so a micro-batch has fewer targets than it has tokens."""
    given = Given(ranks=2, stage=1, experiment={"data": FUNCTIONS})
    record = given.verify(tmp_path, rank_pool)
    equivalent(record)
    assert len({weight for row in record.steps[0].micro_batch_weights.expected or [] for weight in row}) == 6


def test_the_record_has_every_key_and_no_nan(rank_pool: RankPools, tmp_path: Path) -> None:
    given = Given(ranks=2, ragged=True)
    for options in ({}, {"fault": "loss-scaled-twice"}):
        text = given.verify(tmp_path, rank_pool, **options).as_json()
        record = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} in the record"))
        assert record.keys() >= KEYS
        assert record["schema"] == "dsaccum.verify/1"
        assert record["claims"].keys() == {*TESTED, "replicas"}
        for step in record["steps"]:
            for key, parts in STEP_KEYS.items():
                assert parts is None or step[key].keys() >= parts
            assert None not in (step["loss"]["truth"], step["gradient"]["noise"], step["gradient_norm"]["deepspeed"])
        assert record["communication"]["only_at_boundary"] is True
        assert record["trajectory"].keys() == {"max", "mean_drift", "bound"}
        assert {run["accumulation_steps"] for run in record["memory"]["runs"]} >= {3, 6}


def test_autocast_is_forgotten_before_the_next_case(rank_pool: RankPools, tmp_path: Path) -> None:
    """DeepSpeed keeps "autocast is on" for the process: fp32 after it on the same ranks would compute in bf16."""
    given = Given(ranks=1, stage=1)
    equivalent(replace(given, precision="autocast").verify(tmp_path, rank_pool))
    equivalent(given.verify(tmp_path, rank_pool))


@pytest.mark.parametrize("precision", ["bf16", pytest.param("autocast", marks=pytest.mark.slow)])
def test_zero_3s_linear_layer_is_the_references_too_and_ends_with_its_engine(
    rank_pool: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """DeepSpeed replaces torch's for the whole process by one that rounds once more; ZeRO 1 is due torch's again.

    One micro-batch of OPT, whose layers have biases: the reference does what the run does, operation by operation, so
    weights are as right as in fp32; one bf16 rounding that differs costs more than 1e-5. The control is a reference
    that has torch's own at ZeRO 3.
    """
    given = Given(architecture="opt", micro_steps=1, rows=1, precision=precision, length=24, clipping=0.0)

    def furthest(stage: int) -> float:
        record = replace(given, stage=stage).verify(tmp_path, rank_pool, steps=4)
        assert record.verdict == "equivalent", found(record)
        return max(step.micro_batch_weights.max_error or 0.0 for step in record.steps)

    assert furthest(3) < 1e-6
    assert furthest(1) < 1e-6
    monkeypatch.setattr(truth, "_linear_of_zero_3", torch._C._nn.linear)
    without = replace(given, stage=3).verify(tmp_path, rank_pool, steps=4)
    assert max(step.micro_batch_weights.max_error or 0.0 for step in without.steps) > 1e-5


def halve_linear(context: RankContext | None = None) -> None:
    """As an engine that ran before leaves torch's linear layer: replaced for the whole process."""
    torch.nn.functional.linear = lambda x, weight, bias=None: torch._C._nn.linear(x, weight, bias) / 2


def test_a_linear_layer_replaced_by_others_is_torchs_again(
    rank_pool: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the ranks before their first task, and in the process that calls: its own ZeRO 3 engine replaces it there."""
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)  # put back after the test
    with RankPools() as fresh:
        fresh.get(1).run(halve_linear)
        halve_linear()
        replaced = torch.nn.functional.linear
        equivalent(Given(architecture="opt", ranks=1).verify(tmp_path, fresh))
        assert torch.nn.functional.linear is replaced


# Loops of others ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["outside-loss", "hf-labels"])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_plain_loops_are_right_on_packed_rows(rank_pool: RankPools, tmp_path: Path, loop: str, ranks: int) -> None:
    equivalent(Given(ranks=ranks).verify(tmp_path, rank_pool, loop=loop))


@pytest.mark.parametrize("loop", ["outside-loss", "hf-labels"])
def test_plain_loops_are_a_mean_of_means_on_ragged_rows(rank_pool: RankPools, tmp_path: Path, loop: str) -> None:
    record = Given(ranks=2, ragged=True, last_window="drop").verify(tmp_path, rank_pool, loop=loop)
    assert record.verdict == "not_equivalent"
    assert [(cause.id, cause.confidence) for cause in record.causes] == [("mean-of-means", "certain")], found(record)
    assert record.claims.gradient == "fail"


# A fault of the user's own, the control of everything above --------------------------------------------------------

ONE_PERCENT = """
from dsaccum.verification.subject.faults import Weighed

def one_percent():
    return Weighed(
        id="one-percent",
        summary="the second micro-batch of rank 0 weighs 1 % more",
        factor=lambda case, rank, micro_step: 1.01 if (rank, micro_step) == (0, 2) else 1.0,
    )

def nothing():
    return 3

def broken():
    raise RuntimeError("no such thing")
"""


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"ragged": True}, marks=pytest.mark.slow),
        {"stage": 3},
        {"precision": "bf16"},
        pytest.param({"optimizer": ADAMW}, marks=pytest.mark.slow),
    ],
)
def test_a_weight_that_is_one_percent_off_is_seen(
    rank_pool: RankPools, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Where it is: the weight recovered for rank 0, micro-step 2, and no other."""
    (tmp_path / "mine.py").write_text(ONE_PERCENT)
    given = Given(ranks=2, last_window="drop", **changes)
    record = given.verify(tmp_path, rank_pool, fault=f"{tmp_path}/mine.py:one_percent")
    assert record.verdict == "not_equivalent"
    assert record.claims.gradient == "fail"
    weights = record.steps[0].micro_batch_weights
    ratios = [
        [(got or 0) / (due or 1) for got, due in zip(*rows, strict=True)]
        for rows in zip(weights.recovered or [], weights.expected or [], strict=True)
    ]
    close = 1e-5 if record.precision == "fp32" else 4e-3
    assert ratios[1][0] == pytest.approx(1.01, abs=close)
    assert [ratio for k, row in enumerate(ratios) for r, ratio in enumerate(row) if (k, r) != (1, 0)] == pytest.approx(
        [1.0] * 5, abs=close
    )


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("mine.py:one_percents", "has no function 'one_percents'; fix: .*mine.py:one_percent$"),
        ("mine.py:nothing", "the function returned int; allowed: a dsaccum.verification.subject.faults.Fault"),
        ("mine.py:broken", "the function raised RuntimeError: no such thing"),
        ("theirs.py:one_percent", "there is no such file"),
    ],
)
def test_a_fault_of_ones_own_must_be_one(rank_pool: RankPools, tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "mine.py").write_text(ONE_PERCENT)
    with pytest.raises(ConfigError, match="--inject") as caught:
        Given().verify(tmp_path, rank_pool, fault=f"{tmp_path}/{name}")
    assert caught.match(problem)
