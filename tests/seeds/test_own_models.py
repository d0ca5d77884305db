"""Models and losses of a user's own get the verdict that they deserve, through ``dsaccum.verify`` on real ranks.

Run: pytest -n 0 tests/seeds/test_own_models.py (about two seconds a case once the ranks are there). Ragged rows, N = 3,
AdamW with weight decay, clipping. Bounds are the product's own. Controls: a fault that is planted in the same model is
named, and what makes a model odd is taken out again. Not covered: models that are too large (tests/verification/
test_shrink.py), GPUs.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from dsaccum.config.errors import ConfigError
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import VerifyRecord
from tests.verification.verifying import ADAMW, Given, found

pytestmark = pytest.mark.distributed
MODELS = Path(__file__).with_name("models.py")
EXPERTS = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
           "num_key_value_heads": 1}  # fmt: skip
MIXTRAL = {"architecture": "mixtral", "config": {**EXPERTS, "num_local_experts": 4}}
QWEN_MOE = {
    "architecture": "qwen2_moe",
    "config": {**EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
               "num_experts_per_tok": 2},
}  # fmt: skip
ROUTED = {**MIXTRAL, "config": {**MIXTRAL["config"], "output_router_logits": True}}


def given(model: str | dict[str, Any], loss: str | None = None, **options: Any) -> Given:
    """A factory of models.py by name, or the ``model`` section itself."""
    parts: dict[str, Any] = {"model": {"factory": f"{MODELS}:{model}"} if isinstance(model, str) else model}
    if loss is not None:
        parts["loss"] = {"factory": f"{MODELS}:{loss}"}
    return Given(ragged=True, experiment=parts, **options)


def equivalent(record: VerifyRecord) -> None:
    assert record.verdict == "equivalent", found(record)
    assert (record.claims.gradient, record.claims.update) == ("pass", "pass")


def only_cause(record: VerifyRecord, identifier: str) -> dict[str, Any]:
    """The evidence of the one cause, which is certain."""
    assert record.verdict == "not_equivalent", found(record)
    assert [(cause.id, cause.confidence) for cause in record.causes] == [(identifier, "certain")], found(record)
    return record.causes[0].evidence


CLEAN = [
    pytest.param(given("plain"), id="plain"),
    pytest.param(given("adapted"), id="frozen-with-adapters"),
    pytest.param(given("adapted", ranks=2, stage=2), marks=pytest.mark.slow, id="frozen-with-adapters-zero-2"),
    pytest.param(given("adapted", ranks=2, stage=3), id="frozen-with-adapters-zero-3"),
    pytest.param(given("tied"), id="tied"),
    pytest.param(given("tied", ranks=2, stage=1), id="tied-zero-1"),
    pytest.param(given("tied", stage=3), id="tied-zero-3"),
    pytest.param(given(MIXTRAL), id="mixtral"),
    pytest.param(given(QWEN_MOE, ranks=2), id="qwen2-moe"),
    pytest.param(given("plain", "smoothed"), id="label-smoothing"),
    pytest.param(given("plain", "smoothed", ranks=2), id="label-smoothing-two-ranks"),
]


@pytest.mark.parametrize("case", CLEAN)
def test_sound_models_and_losses_are_equivalent(case: Given, tmp_path: Path, rank_pool: RankPools) -> None:
    record = case.verify(tmp_path, rank_pool)
    equivalent(record)
    assert not any("dropout" in line for line in record.substitutions)


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (given("adapted"), "micro-batch-dropped"),
        (given("adapted"), "parameter-gradient-lost"),
        (given("tied"), "loss-scaled-twice"),
        (given(MIXTRAL), "micro-batch-dropped"),
        (given("plain", "smoothed"), "micro-batch-dropped"),
    ],
    ids=["adapted-dropped", "adapted-lost", "tied-twice", "mixtral-dropped", "smoothed-dropped"],
)
def test_a_fault_in_the_same_model_is_named(case: Given, fault: str, tmp_path: Path, rank_pool: RankPools) -> None:
    """Controls for the test above."""
    only_cause(case.verify(tmp_path, rank_pool, fault=fault), fault)


def without_decay() -> dict[str, Any]:
    optimizer = copy.deepcopy(ADAMW)
    optimizer["params"]["weight_decay"] = 0.0
    return optimizer


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_what_gets_no_gradient_is_decayed_at_every_stage(stage: int, tmp_path: Path, rank_pool: RankPools) -> None:
    """Plain PyTorch leaves a parameter without gradient alone; DeepSpeed 0.19.8 steps it with zeros, so it decays."""
    evidence = only_cause(given("idle", stage=stage).verify(tmp_path, rank_pool), "absent-gradient-decayed")
    assert evidence["parameters"] == ["idle.bias", "idle.weight"]


@pytest.mark.parametrize(
    "case",
    [given("idle", optimizer=without_decay()), given("idle", optimizer=without_decay(), stage=1), given("idle_frozen")],
    ids=["no-decay", "no-decay-zero-1", "frozen"],
)
def test_without_decay_or_frozen_it_stays(case: Given, tmp_path: Path, rank_pool: RankPools) -> None:
    """Control, and both of the fixes that the cause names."""
    equivalent(case.verify(tmp_path, rank_pool))


def test_a_routers_loss_is_no_sum_over_samples(tmp_path: Path, rank_pool: RankPools) -> None:
    evidence = only_cause(given(ROUTED, "routed").verify(tmp_path, rank_pool), "loss-not-additive")
    assert evidence["float64_error"] > 1e-3
    assert ".gate." in evidence["worst_parameter"], "it is the router that is pulled elsewhere"


def test_a_routers_loss_that_nobody_states_is_refused(tmp_path: Path, rank_pool: RankPools) -> None:
    """And without the term the same model is equivalent: ``mixtral`` above."""
    with pytest.raises(ConfigError, match="adds a loss of its own to the cross entropy"):
        given(ROUTED).verify(tmp_path, rank_pool)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_statistics_over_the_batch_are_no_sum_over_samples(ranks: int, tmp_path: Path, rank_pool: RankPools) -> None:
    record = given("normalised", ranks=ranks).verify(tmp_path, rank_pool)
    assert only_cause(record, "loss-not-additive")["float64_error"] > 1e-3
    assert record.claims.gradient == "fail"


def test_statistics_over_a_batch_that_is_not_split_are_right(tmp_path: Path, rank_pool: RankPools) -> None:
    """Control: with one micro-batch, big batch and micro-batch are the same."""
    equivalent(given("normalised", rows=4).verify(tmp_path, rank_pool, accumulation_steps=1))


def test_dropout_inside_a_factory_is_set_to_0_and_said(tmp_path: Path, rank_pool: RankPools) -> None:
    record = given("dropping").verify(tmp_path, rank_pool)
    equivalent(record)
    [note] = [line for line in record.substitutions if "dropout" in line]
    assert note.startswith("dropout is 0 on both sides (hidden_dropout and 1 more)")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_randomness_that_nobody_can_turn_off_is_named(ranks: int, tmp_path: Path, rank_pool: RankPools) -> None:
    """The reference errs as much as the run does, so that no bound of its own could find it."""
    record = given("noisy", ranks=ranks).verify(tmp_path, rank_pool)
    assert only_cause(record, "randomness-active")["reference_twice_differs_by"] > 1e-6
    assert record.claims.gradient == "fail"
