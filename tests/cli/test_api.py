"""``dsaccum.verify``, ``assert_same_update`` and the pytest fixture hand on what they are given.

Run: pytest tests/cli/test_api.py -n 0. The verification itself is a stub.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import dsaccum
from dsaccum.config.errors import ConfigError
from dsaccum.testing import assert_same_update
from dsaccum.verification.cases.arguments import VerifyArguments
from dsaccum.verification.ranks.pools import RankPools
from tests.cli.conftest import StubVerify
from tests.report import records

CHOICES: dict[str, Any] = {
    "experiment": "e.yaml", "ranks": 2, "steps": 4, "accumulation_steps": 3, "micro_batch": 1, "loop": "hf-labels",
    "fault": "loss-scaled-twice", "remedies": False, "full_size": True, "overrides": ["run.seed=1"], "verbose": True,
}  # fmt: skip


@pytest.mark.parametrize(("function", "not_taken"), [(dsaccum.verify, {"strict"}), (assert_same_update, set())])
def test_parameters_are_those_of_the_arguments(function: Any, not_taken: set[str]) -> None:
    """With the same defaults. ``strict`` is about how a command ends; what was typed is of the command alone."""
    taken = {name: each.default for name, each in inspect.signature(function).parameters.items()}
    for field in fields(VerifyArguments):
        if field.name not in {"deepspeed", "command", *not_taken}:
            assert taken[field.name] == field.default


@pytest.mark.parametrize("function", [dsaccum.verify, assert_same_update])
def test_what_is_given_is_handed_on(function: Any, stub: StubVerify) -> None:
    assert function("ds.json", **CHOICES) is stub.result
    expected = {**CHOICES, "experiment": Path("e.yaml"), "overrides": ("run.seed=1",)}
    assert stub.calls == [(VerifyArguments(Path("ds.json"), **expected), None)]


def test_wrong_arguments_raise(stub: StubVerify) -> None:
    with pytest.raises(ConfigError, match="--ranks = 0"):
        dsaccum.verify("ds.json", ranks=0)
    assert stub.calls == []


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    assert "verify" in dir(dsaccum)
    with pytest.raises(AttributeError, match="verfy"):
        dsaccum.verfy  # noqa: B018


def test_the_assertion_says_the_verdict(stub: StubVerify) -> None:
    stub.result = records.loss_scaled_twice()
    with pytest.raises(AssertionError) as raised:
        assert_same_update("ds.json")
    assert str(raised.value).startswith("verdict         NOT EQUIVALENT")
    assert "scale_wrt_gas=False" in str(raised.value)


def test_the_assertion_fails_where_nothing_is_proven(stub: StubVerify) -> None:
    stub.result = records.untested_update()
    with pytest.raises(AssertionError, match="nothing is proven"):
        assert_same_update("ds.json")


def test_the_assertion_is_strict_only_if_asked(stub: StubVerify) -> None:
    stub.result = records.record(unavailable=["FusedAdam was replaced"])
    assert_same_update("ds.json")
    with pytest.raises(AssertionError, match="strict: substituted: FusedAdam"):
        assert_same_update("ds.json", strict=True)


class StubPool:
    """Counts."""

    made: list[StubPool] = []  # noqa: RUF012

    def __init__(self, world_size: int, threads_per_rank: int | None = None) -> None:
        self.world_size, self.started, self.closed = world_size, 0, 0
        self.made.append(self)

    def start(self) -> StubPool:
        self.started += 1
        return self

    def close(self) -> None:
        self.closed += 1
        if self.world_size == 13:
            raise RuntimeError("cannot be closed")


@pytest.fixture
def stub_pools(monkeypatch: pytest.MonkeyPatch) -> list[StubPool]:
    made: list[StubPool] = []
    monkeypatch.setattr(StubPool, "made", made)
    monkeypatch.setattr("dsaccum.verification.ranks.pool.RankPool", StubPool)
    return made


def test_pools_are_started_once_and_closed(stub_pools: list[StubPool]) -> None:
    with RankPools() as pools:
        assert stub_pools == []
        first = pools.get(2)
        assert pools.get(2) is first
        assert pools.get(1) is not first
    assert [(pool.started, pool.closed) for pool in stub_pools] == [(1, 1), (1, 1)]
    assert pools.get(2) is not first, "and start anew if they are asked for again"


def test_all_pools_are_closed_even_if_one_fails_to(stub_pools: list[StubPool]) -> None:
    pools = RankPools()
    for world_size in (1, 13, 2):
        pools.get(world_size)
    with pytest.raises(RuntimeError, match="cannot be closed"):
        pools.close()
    assert [pool.closed for pool in stub_pools] == [1, 1, 1]


def test_the_fixture_comes_with_the_installation(rank_pool: RankPools, stub: StubVerify) -> None:
    """No conftest imports it: it is registered as a plugin (reinstall if it isn't found: ``pip install -e .``)."""
    assert_same_update("ds.json", pool=rank_pool)
    assert stub.calls[0][1] is rank_pool
