"""Which windows are verified, and what each rank is fed: the run's own samples, or random tokens in their shape.

Run: pytest -n 0 tests/verification/test_windows.py. Not covered: what the weights recovered from them say.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsaccum.batch import EffectiveBatch
from dsaccum.config.experiment import Experiment, ModelConfig
from dsaccum.data import FILLER, NOT_A_TARGET, Samples, WindowOrder, WindowStream
from dsaccum.reference_samples import RawSamples
from dsaccum.verification.cases.case import Case, OrderRule, Vocabulary, WindowChoice
from dsaccum.verification.cases.windows import (
    case_stream,
    cut_samples,
    ids_in_use,
    keep_samples,
    needed_samples,
    plan_windows,
    probe_samples,
    shorter_lengths,
    steps_to_verify,
)
from tests.cases import VOCABULARY, random_samples

SPLITS = [EffectiveBatch(1, 1, 6), EffectiveBatch(2, 3, 1), EffectiveBatch(1, 3, 2)]


def case_of(
    samples: Samples, batch: EffectiveBatch, last_window: Any = "continue", steps: int = 3, seed: int = 0
) -> Case:
    rule = OrderRule(len(samples), last_window, seed)
    windows = plan_windows(WindowOrder(len(samples), batch.total, last_window, seed), steps)
    kept = keep_samples(samples, needed_samples(rule, batch.total, windows))
    return Case(
        experiment=Experiment(name="x", model=ModelConfig(architecture="gpt2")),
        source="x.yaml",
        config={},
        batch=batch,
        zero_stage=0,
        precision="fp32",
        accumulation_dtype="fp32",
        gradient_clipping=0.0,
        vocabulary=Vocabulary(VOCABULARY, 1, 0),
        order=rule,
        samples=kept,
        probe_samples=probe_samples(kept, ids_in_use(samples, VOCABULARY), seed),
        windows=windows,
    )


@pytest.mark.parametrize(
    ("wanted", "rates", "steps", "warned"),
    [
        (3, [1.0] * 8, 3, False),
        (3, [0.0, 0.0, *[1.0] * 6], 4, False),  # WarmupLR from 0
        (5, [0.0, 0.0, *[1.0] * 6], 5, False),
        (1, [1.0] * 8, 2, False),
        (3, [*[0.0] * 6, 1.0, 1.0], 8, False),
        (3, [*[0.0] * 7, 1.0], 8, True),
        (3, [0.0] * 8, 8, True),
        (10, [*[0.0] * 9, 1.0], 10, True),
        (3, [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 3, False),
        (3, [], 3, False),
    ],
)
def test_steps_go_on_until_two_updates_have_moved(wanted: int, rates: list[float], steps: int, warned: bool) -> None:
    found, warnings = steps_to_verify(wanted, rates)
    assert found == steps
    assert bool(warnings) == warned


def test_probe_and_text_take_turns() -> None:
    assert plan_windows(WindowOrder(100, 6, "continue", 0), 4) == (
        WindowChoice(0, True), WindowChoice(1, False), WindowChoice(2, True), WindowChoice(3, False)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_samples", "last_window", "indices"),
    [
        (100, "short", [0, 16, 2]),  # 16 whole windows of 6, and one of 4
        (96, "short", [0, 1, 2]),  # no sample is left over
        (100, "continue", [0, 1, 2]),
        (100, "drop", [0, 1, 2]),
        (13, "short", [0, 1, 2]),  # the third is the short one by itself
        (4, "short", [0, 1, 2]),  # every window is short
    ],
)
def test_a_short_window_is_among_them_where_there_is_one(num_samples: int, last_window: Any, indices: Any) -> None:
    order = WindowOrder(num_samples, 6, last_window, 0)
    windows = plan_windows(order, 3)
    assert [choice.index for choice in windows] == indices
    if last_window == "short" and num_samples % 6:
        assert any((order.sample_ids(choice.index) == FILLER).any() for choice in windows)


@pytest.mark.parametrize("last_window", ["continue", "drop", "short"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_text_windows_are_the_runs_own(last_window: str, padded: bool) -> None:
    samples = random_samples(37, padded=padded)
    for batch in SPLITS:
        case = pickle.loads(pickle.dumps(case_of(samples, batch, last_window, steps=4)))
        order = WindowOrder(37, batch.total, last_window, seed=0)
        for rank in range(batch.world_size):
            ours, theirs = case_stream(case, rank), WindowStream(samples, order, batch, rank, 0)
            assert len(ours) == 4
            for step, choice in enumerate(case.windows):
                assert ours.sample_ids(step).tolist() == theirs.sample_ids(choice.index).tolist()
                assert ours.samples_in(step) == theirs.samples_in(choice.index)
                for mine, due in zip(ours.window(step), theirs.window(choice.index), strict=True):
                    assert mine.keys() == due.keys()
                    same = {name: torch.equal(mine[name], due[name]) for name in due}
                    assert all(same.values()) or (choice.probe and same.get("attention_mask", True))
                    assert (mine["labels"] == NOT_A_TARGET).equal(due["labels"] == NOT_A_TARGET)
                    holds_a_sample = bool((due["labels"] != NOT_A_TARGET).any())
                    assert same["input_ids"] != (choice.probe and holds_a_sample), "a probe's tokens are others"


def test_probe_tokens_are_drawn_from_the_texts_and_always_alike() -> None:
    samples = random_samples(200, padded=True)
    in_use = ids_in_use(samples, VOCABULARY)
    assert in_use.tolist() == sorted(set(samples.tokens.tolist()))
    some = in_use[::3]
    probe = probe_samples(samples, some, seed=0)
    assert set(probe.tokens.tolist()) == set(some.tolist())
    assert probe.tokens.dtype == samples.tokens.dtype
    assert np.array_equal(probe.tokens, probe_samples(samples, some, seed=0).tokens)
    assert not np.array_equal(probe.tokens, probe_samples(samples, some, seed=1).tokens)


def test_only_what_is_needed_travels_to_the_ranks() -> None:
    samples, batch = random_samples(10_000, padded=False), EffectiveBatch(1, 2, 2)
    case = case_of(samples, batch)
    assert len(case.samples) == 10_000
    # Windows 0 to 2, one more, and the doubled one, which is windows 0 and 1.
    assert np.count_nonzero(case.samples.lengths) == 4 * batch.total
    assert len(case.samples.tokens) == 4 * batch.total * samples.sequence_length


def test_one_window_more_is_there_and_no_other() -> None:
    case = case_of(random_samples(100, padded=True), EffectiveBatch(1, 2, 2))
    assert len(case_stream(case.with_windows((WindowChoice(3, False),)), 0).window(0)) == 2
    with pytest.raises(ValueError, match="window 4 is none of this case"):
        case_stream(case.with_windows((WindowChoice(4, False),)), 0).window(0)


@pytest.mark.parametrize("last_window", ["continue", "drop", "short"])
@pytest.mark.parametrize("num_samples", [6, 7, 11, 12, 13, 37])
def test_other_splits_of_the_first_window_and_twice_of_it_are_there(last_window: str, num_samples: int) -> None:
    samples = random_samples(num_samples, padded=True)
    case = case_of(samples, EffectiveBatch(2, 3, 1), last_window)
    first = case.with_windows(case.windows[:1])
    for steps, rows in ((1, 3), (3, 1), (6, 1), (2, 1)):
        for rank in range(2):
            window = case_stream(first.split(steps, rows), rank).window(0)
            assert [len(micro_batch["labels"]) for micro_batch in window] == [rows] * steps


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=30),
    st.sampled_from([16, 24, 64, 128]),
)
@settings(max_examples=200, deadline=None)
def test_cut_rows_keep_a_target_and_their_own_tokens(parts: list[tuple[int, int]], length: int) -> None:
    """Rows as the product makes them: at most 256 tokens, and a target behind the prompt and the first token."""
    rows = [(prompt, min(prompt + max(targets, 2 - prompt), 256)) for prompt, targets in parts if prompt < 255]
    if not rows:
        return
    prompts, lengths = (np.array(column) for column in zip(*rows, strict=True))
    tokens = np.arange(lengths.sum())
    samples = Samples(tokens, np.cumsum(lengths) - lengths, lengths, prompts, 256, True, 0)
    cut = cut_samples(samples, length)
    assert len(cut) == len(samples)
    for index in range(len(samples)):
        (input_ids, labels), (all_ids, all_labels) = cut[index], samples[index]
        assert 2 <= len(input_ids) <= min(length, len(all_ids))
        assert (labels[1:] != NOT_A_TARGET).any()
        assert set(input_ids) <= set(all_ids)
        assert set(labels) <= set(all_labels)
        assert (np.diff(input_ids) == 1).all(), "still in a row"


def test_ragged_rows_stay_ragged() -> None:
    long = np.array([250, 251, 252, 256])
    samples = Samples(np.zeros(long.sum(), np.uint8), np.cumsum(long) - long, long, np.zeros(4, np.int64), 256, True, 0)
    assert shorter_lengths(samples) == [128, 64, 32], "at 16 all four rows would have 16 tokens"
    level = replace(samples, lengths=np.full(4, 250))
    assert shorter_lengths(level) == [128, 64, 32, 16]
    assert shorter_lengths(random_samples(10, padded=True)) == [], "16 is the shortest"


def test_packed_rows_are_cut_to_just_the_length() -> None:
    tokens = np.arange(3 * 256, dtype=np.uint16)
    starts = np.array([0, 256, 512])
    samples = Samples(tokens, starts, np.full(3, 256), np.zeros(3, np.int64), 256, False, 0)
    cut = cut_samples(samples, 64)
    assert [cut[index][0].tolist() for index in range(3)] == [list(range(start, start + 64)) for start in starts]
    raw = RawSamples(cut.tokens, cut.starts, cut.lengths, cut.prompt_lengths, cut.padded, cut.sequence_length)
    assert not raw.ragged
