"""The word for each split and for the whole, and what helps. Run: pytest tests/bench/test_decision.py -n 0."""

from __future__ import annotations

import pytest

from dsaccum.bench.decision import LEAST_SAVING, advice, judged, overall, recommended
from tests.bench.records import candidate, failed


def words(*candidates):
    return [each.word for each in judged(candidates)]


def test_less_memory_and_the_same_update_is_accepted() -> None:
    found = judged([candidate(1, activation=160), candidate(4, activation=40, gradient=10, seconds=1.25)])
    assert [each.word for each in found] == [None, "accept"]
    assert "110.0 MiB (58%) less memory, at 1.25 x the time of N = 1" in found[1].reason
    assert overall(found) == ("accept", f"N = 4, B = 4: {found[1].reason}")


def test_a_gradient_buffer_that_outweighs_the_activations_is_tune() -> None:
    found = judged([candidate(1, activation=8), candidate(2, activation=4, gradient=10)])
    assert found[1].word == "tune"
    assert "4.0 MiB saved, 10.0 MiB of gradients added" in found[1].reason


def test_a_peak_in_which_activations_are_nothing_is_tune() -> None:
    found = judged([candidate(1, activation=1, optimizer=200), candidate(2, activation=1, optimizer=200)])
    assert found[1].word == "tune"
    assert "optimizer states 200.0 MiB: the size of a micro-batch hardly matters" in found[1].reason


def test_a_peak_that_no_split_changes_is_tune() -> None:
    """That of the optimizer's step: what it makes for itself is counted as activations."""
    found = judged([candidate(1, activation=50, optimizer=100), candidate(2, activation=50, optimizer=100)])
    assert found[1].word == "tune"
    assert "is made of the same in both, most of it optimizer states (100.0 MiB)" in found[1].reason


@pytest.mark.parametrize(("saved", "word"), [(0.9, "tune"), (1.1, "accept")])
def test_the_least_saving_that_counts(saved: float, word: str) -> None:
    base = candidate(1, activation=1000, parameter=0, optimizer=0)
    less = candidate(2, activation=round(1000 * (1 - saved * LEAST_SAVING)), parameter=0, optimizer=0)
    assert words(base, less) == [None, word]


def test_a_wrong_update_is_rejected_however_much_it_saves() -> None:
    wrong = candidate(4, activation=1, verdict="not_equivalent", causes=("loss-scaled-twice",))
    found = judged([candidate(1, activation=160), candidate(2, activation=80), wrong])
    assert [each.word for each in found] == [None, "accept", "reject"]
    word, reason = overall(found)
    assert word == "reject"
    assert "loss-scaled-twice" in reason


def test_the_first_split_is_rejected_too_where_its_update_is_wrong() -> None:
    assert words(candidate(1, activation=9, verdict="not_equivalent"), candidate(2, activation=1))[0] == "reject"


def test_an_update_that_could_not_be_verified_is_no_word() -> None:
    assert words(candidate(1, activation=160), candidate(4, activation=40, verdict=None)) == [None, None]


def test_what_failed_leaves_the_others_comparable() -> None:
    found = judged([failed(1), candidate(2, activation=80), candidate(4, activation=40)])
    assert [each.word for each in found] == [None, None, "accept"]
    assert found[0].reason == "rank 1 was killed (signal 9)"


def test_nothing_to_compare_is_no_word() -> None:
    word, reason = overall(judged([failed(1), candidate(2, activation=80)]))
    assert word is None
    assert "compared" in reason


def test_of_splits_that_need_hardly_more_the_quickest_is_recommended() -> None:
    least, little_more, much_more = (
        candidate(16, activation=7, seconds=1.5), candidate(8, activation=8, seconds=1.0),
        candidate(4, activation=14, seconds=0.9),
    )  # fmt: skip
    assert recommended([much_more, little_more, least]) is little_more


@pytest.mark.parametrize(
    ("sizes", "config", "words"),
    [
        ({"activation": 90}, {}, "activation_checkpointing"),
        ({"activation": 1, "optimizer": 90}, {}, '"stage": 1'),
        ({"activation": 1, "gradient": 90}, {"zero_optimization": {"stage": 1}}, '"stage": 2'),
        ({"activation": 1, "parameter": 90}, {"bf16": {"enabled": True}}, '"stage": 3'),
        ({"activation": 1, "temporary": 90}, {"zero_optimization": {"stage": 1}}, "500,000,000 elements"),
    ],
)
def test_what_helps(sizes: dict[str, int], config: dict[str, object], words: str) -> None:
    [line] = advice([candidate(1, **sizes)], config, checkpointing=False)
    assert words in line


def test_nothing_is_advised_that_is_done_already() -> None:
    config = {"bf16": {"enabled": True}}
    assert advice([candidate(1, activation=90)], config, checkpointing=True) == []
