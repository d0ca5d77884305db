"""Which splits are compared, and in what order. Run: pytest tests/bench/test_candidates.py -n 0."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dsaccum.batch import EffectiveBatch
from dsaccum.bench.arguments import BenchArguments, parse_steps
from dsaccum.bench.candidates import candidates, in_turn
from dsaccum.config.errors import ConfigError


def steps(batch: EffectiveBatch, *wanted: int) -> list[tuple[int, int]]:
    return [(each.accumulation_steps, each.micro_batch) for each in candidates(batch, wanted)]


def test_powers_of_two_and_the_configured_one() -> None:
    assert steps(EffectiveBatch(2, 3, 4)) == [(1, 12), (2, 6), (3, 4), (4, 3)]


def test_the_effective_batch_stays() -> None:
    assert {each.total for each in candidates(EffectiveBatch(2, 4, 4), ())} == {32}


def test_those_that_are_asked_for() -> None:
    assert steps(EffectiveBatch(1, 4, 4), 8, 1) == [(1, 16), (8, 2)]


def test_what_does_not_divide_is_refused_with_what_does() -> None:
    with pytest.raises(ConfigError, match=r"does not divide the 16 samples.*1, 2, 4, 8, 16"):
        steps(EffectiveBatch(1, 4, 4), 3)


def test_in_a_round_each_runs_once() -> None:
    for number in range(7):
        assert sorted(in_turn(5, number)) == [0, 1, 2, 3, 4]


def test_over_rounds_each_comes_first_as_often() -> None:
    orders = [in_turn(4, number) for number in range(8)]
    assert set(Counter(order[0] for order in orders).values()) == {2}


def test_a_steady_drift_hurts_all_alike() -> None:
    """Each split's places over a pair of rounds have the same sum."""
    forth, back = in_turn(5, 4), in_turn(5, 5)
    assert {forth.index(split) + back.index(split) for split in range(5)} == {4}


@pytest.mark.parametrize("text", ["1,x", "", "1,,2", "2.5"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ConfigError, match="--accum-steps"):
        parse_steps(text)


def test_a_list() -> None:
    assert parse_steps("1, 4,4,2") == (1, 4, 2)


@pytest.mark.parametrize(
    "wrong", [{"rounds": 0}, {"windows": 63}, {"ranks": 0}, {"accumulation_steps": (0,)}, {"label": "../up"},
              {"label": ""}],
)  # fmt: skip
def test_what_is_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        BenchArguments(deepspeed=Path("ds.json"), **wrong)


def test_where_a_label_is_kept() -> None:
    assert BenchArguments(deepspeed=Path("ds.json"), label="a100").labelled == Path("bench-results/a100.json")
