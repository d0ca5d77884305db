"""What looks like a fault of the table and is another: it is found, and not called by that fault's name.

Run: pytest -m slow -n 0 tests/verification/test_wrong_names.py (a minute on two idle cores). Each was once called
wrongly, as a certainty. The right names of the faults themselves are tests/verification/test_faults_named.py's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsaccum.config.errors import ConfigError
from dsaccum.verification.comparison.evidence import Counts
from dsaccum.verification.diagnosis.gradient import _fits
from dsaccum.verification.diagnosis.signatures import signatures
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import VerifyRecord
from tests.verification.verifying import ADAMW, Given, found

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
HERE = Path(__file__).parent
FAULTS, MODELS = HERE / "odd_faults.py", HERE / "odd_models.py"
SLOW = pytest.mark.slow
UNKNOWN = [("unknown-difference", "ambiguous")]


def causes(record: VerifyRecord) -> list[tuple[str, str]]:
    assert record.verdict == "not_equivalent", found(record)
    return [(cause.id, cause.confidence) for cause in record.causes]


def adamw(**changes: Any) -> dict[str, Any]:
    return {**ADAMW, "params": {**ADAMW["params"], **changes}}


def model(name: str) -> dict[str, Any]:
    return {"model": {"factory": f"{MODELS}:{name}"}}


def test_divided_by_the_ranks_twice_is_not_divided_by_n_twice(rank_pool: RankPools, tmp_path: Path) -> None:
    """With N = W both make the same weights; one more window at N + 1 tells them apart."""
    given = Given(ranks=2, micro_steps=2)
    for fault in ("ranks-averaged-twice", "loss-scaled-twice"):
        assert causes(given.verify(tmp_path, rank_pool, fault=fault)) == [(fault, "certain")]


@pytest.mark.parametrize(("steps", "ranks"), [(2, 2), (3, 2), (4, 2), (2, 4), (1, 2), (3, 1)])
def test_no_two_faults_that_undo_each_other_are_a_signature(steps: int, ranks: int) -> None:
    ones = [[6] * ranks] * steps
    alike = [each.faults for each in signatures(Counts(ones, ones, ones), rank=0)
             if all(abs(w * steps * ranks - 1) < 1e-9 for row in each.weights for w in row)]  # fmt: skip
    scales = {"loss-not-scaled", "loss-scaled-twice", "ranks-summed", "ranks-averaged-twice"}
    assert () in alike
    assert not any(scales & set(faults) for faults in alike)


@pytest.mark.parametrize(("off", "fits"), [(1.06, False), (1.0, True), (1.015, True)])
def test_small_weights_are_told_apart_as_well_as_large_ones(off: float, fits: bool) -> None:
    """In bf16, 1/16 of what is due was taken for a clipped gradient of 0.059 of it: 6 % apart, 1 % is the tolerance."""
    due, clipped = [0.25] * 4, [[0.25 * 0.059]] * 4
    recovered = SimpleNamespace(weights=[0.25 * 0.059 * off] * 4)
    check: Any = SimpleNamespace(recovered=recovered, tolerance=0.01)
    step: Any = SimpleNamespace(truth=SimpleNamespace(due_in_order=due))
    assert _fits(check, step, clipped) is fits
    only_last = [[0.0], [0.0], [0.0], [0.25]]
    noisy: Any = SimpleNamespace(recovered=SimpleNamespace(weights=[0.002, -0.002, 0.0, 0.25]), tolerance=0.01)
    assert _fits(noisy, step, only_last)


def test_one_tensor_changed_after_clipping_is_no_wrong_limit(rank_pool: RankPools, tmp_path: Path) -> None:
    given = Given(clipping=0.1)
    record = given.verify(tmp_path, rank_pool, fault=f"{FAULTS}:shrinks_one_gradient")
    assert causes(record) == UNKNOWN, found(record)
    assert {"clipping"} <= set(record.claims.which("fail"))
    assert causes(given.verify(tmp_path, rank_pool, fault="clipping-mismatch")) == [("clipping-mismatch", "certain")]


@pytest.mark.parametrize("decay", [0.0, pytest.param(0.1, marks=SLOW)])
def test_an_unused_parameter_that_is_written_to_was_not_decayed(
    rank_pool: RankPools, tmp_path: Path, decay: float
) -> None:
    given = Given(optimizer=adamw(weight_decay=decay), experiment=model("unused"))
    record = given.verify(tmp_path, rank_pool, fault=f"{FAULTS}:writes_to_unused")
    assert causes(record) == UNKNOWN, found(record)


def test_an_unused_parameter_that_is_decayed_is_called_so(rank_pool: RankPools, tmp_path: Path) -> None:
    """Control: DeepSpeed's own fault."""
    record = Given(experiment=model("unused")).verify(tmp_path, rank_pool)
    assert causes(record) == [("absent-gradient-decayed", "certain")], found(record)
    without = Given(optimizer=adamw(weight_decay=0.0), experiment=model("unused")).verify(tmp_path, rank_pool)
    assert without.verdict == "equivalent", found(without)


@SLOW
def test_nan_that_the_optimizer_makes_is_not_blamed_on_samples(rank_pool: RankPools, tmp_path: Path) -> None:
    """With eps = 0 an element without gradient is 0 / 0: the embedding of a byte that does not occur."""
    record = Given(optimizer=adamw(eps=0.0)).verify(tmp_path, rank_pool)
    assert "non-finite-gradient" not in dict(causes(record)), found(record)
    assert "nan" in record.reasons["update"]


def test_the_first_wrong_rate_is_shown(rank_pool: RankPools, tmp_path: Path) -> None:
    record = Given().verify(tmp_path, rank_pool, fault=f"{FAULTS}:third_rate")
    assert causes(record) == [("rate-mismatch", "certain")], found(record)
    assert "(step 3: used" in record.causes[0].summary


@SLOW
def test_gradients_of_most_tensors_in_the_wrong_place_are_no_single_lost_one(
    rank_pool: RankPools, tmp_path: Path
) -> None:
    """A sign turned in more than half of the tensors: nothing in the table does that."""
    path = tmp_path / "mostly.py"
    path.write_text(
        "from contextlib import contextmanager\n"
        "from dsaccum.verification.subject.faults import Fault\n"
        "class Turned(Fault):\n"
        "    @contextmanager\n"
        "    def planted(self, subject, case):\n"
        "        every = list(subject.engine.module.parameters())\n"
        "        chosen = every[::2] + every[1::4]\n"
        "        hooks = [parameter.register_hook(lambda g: -g) for parameter in chosen]\n"
        "        yield\n"
        "        for hook in hooks: hook.remove()\n"
        "def turned(): return Turned(id='turned', summary='most signs are turned')\n"
    )
    record = Given().verify(tmp_path, rank_pool, fault=f"{path}:turned")
    assert causes(record) == UNKNOWN, found(record)


def test_a_parameter_without_dimension_is_the_models_fault(rank_pool: RankPools, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"experiment\.yaml: model: .* parameter scale.*fix: give it the shape \[1\]"):
        Given(experiment=model("scalar")).verify(tmp_path, rank_pool)


# What was called wrong and is right --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 2])
def test_gradients_reordered_by_round_robin_are_right(rank_pool: RankPools, tmp_path: Path, stage: int) -> None:
    """DeepSpeed's own links to its masters are wrong there (0.19.8): safe_get_full_fp32_param reads other tensors."""
    given = Given(ranks=2, stage=stage, config={"zero_optimization": {"stage": stage, "round_robin_gradients": True}})
    record = given.verify(tmp_path, rank_pool)
    assert record.verdict == "equivalent", found(record)
    wrong = given.verify(tmp_path, rank_pool, fault="parameter-gradient-lost")
    assert causes(wrong) == [("parameter-gradient-lost", "certain")]


@pytest.mark.parametrize(
    ("dtype", "stage"),
    [("bf16", 2), *(pytest.param(*each, marks=SLOW) for each in (("bf16", 0), ("bf16", 1), ("bf16", 3), ("fp16", 0)))],
)
def test_what_is_rounded_on_the_wire_as_asked_for_is_right(
    rank_pool: RankPools, tmp_path: Path, dtype: str, stage: int
) -> None:
    given = Given(ranks=2, stage=stage, config={"communication_data_type": dtype})
    record = given.verify(tmp_path, rank_pool)
    assert record.verdict == "equivalent", found(record)
    wrong = replace(given).verify(tmp_path, rank_pool, fault="ranks-averaged-twice")
    assert causes(wrong) == [("ranks-averaged-twice", "certain")]
