"""The reference's own samples, order and batches against what the product feeds, for every way of splitting E.

Run: pytest tests/reference/test_samples.py. Not covered: samples from documents (tests/data/test_samples.py).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsaccum.batch import EffectiveBatch
from dsaccum.data import Samples, WindowOrder, WindowStream
from dsaccum.reference_samples import NO_SAMPLE, RawSamples, ReferenceSamples
from tests.cases import random_samples

PAD = 0
SPLITS = [EffectiveBatch(w, n, b) for w, n, b in itertools.product((1, 2), (1, 2, 3, 4, 5), (1, 3))]


def raw_of(samples: Samples) -> RawSamples:
    return RawSamples(
        samples.tokens, samples.starts, samples.lengths, samples.prompt_lengths, samples.padded, samples.sequence_length
    )


def reference_of(
    samples: Samples, batch: EffectiveBatch, last_window: str, *, seed: int = 0, before: tuple[int, ...] = ()
) -> ReferenceSamples:
    return ReferenceSamples(
        raw_of(samples),
        seed=seed,
        last_window=last_window,
        accumulation_steps=batch.accumulation_steps,
        world_size=batch.world_size,
        micro_batch=batch.micro_batch,
        pad_token=PAD,
        before=before,
    )


def streams_of(samples: Samples, batch: EffectiveBatch, last_window: str) -> list[WindowStream]:
    order = WindowOrder(len(samples), batch.total, last_window, seed=0)
    return [WindowStream(samples, order, batch, rank, PAD) for rank in range(batch.world_size)]


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.mark.parametrize("last_window", ["continue", "drop", "short"])
def test_the_stream_goes_on_where_another_effective_batch_left_it(last_window: str) -> None:
    samples, now = random_samples(37, padded=False), EffectiveBatch(2, 2, 3)
    for earlier, windows in itertools.product((4, 6, 10), (1, 3, 4, 9, 10)):
        reference = reference_of(samples, now, last_window, before=(earlier,) * windows)
        position = WindowOrder(37, earlier, last_window, seed=0).position_of(windows)
        order = WindowOrder(37, now.total, last_window, seed=0, first_window=windows, position=position)
        for window in range(windows, windows + 8):
            assert np.array_equal(reference.sample_ids(window), order.sample_ids(window)), (earlier, windows, window)


@pytest.mark.parametrize("last_window", ["continue", "drop", "short"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_every_micro_batch_is_what_the_product_feeds(last_window: str, padded: bool) -> None:
    samples = random_samples(37, padded=padded)  # a prime: no E divides it
    for batch in SPLITS:
        reference, streams = (make(samples, batch, last_window) for make in (reference_of, streams_of))
        for window in range(2 + 2 * 37 // batch.total):  # across two epochs' ends
            ours = reference.micro_batch_batches(window)
            for rank, stream in enumerate(streams):
                assert reference.micro_batch_ids(window)[:, rank].tolist() == stream.sample_ids(window).tolist()
                theirs = stream.window(window)
                assert all(same(ours[step][rank], theirs[step]) for step in range(batch.accumulation_steps))


@pytest.mark.parametrize("last_window", ["continue", "drop", "short"])
def test_a_window_holds_the_same_samples_however_it_is_split(last_window: str) -> None:
    samples = random_samples(37, padded=True)
    splits = [EffectiveBatch(w, n, 12 // (w * n)) for w, n in [(1, 1), (1, 3), (2, 2), (2, 3), (1, 12)]]
    for window in range(7):
        whole = [reference_of(samples, batch, last_window).window_batch(window) for batch in splits]
        assert all(same(whole[0], other) for other in whole[1:])


def test_the_big_batch_is_its_micro_batches_one_below_the_other() -> None:
    samples, batch = random_samples(37, padded=True), EffectiveBatch(2, 3, 2)
    reference = reference_of(samples, batch, "short")
    window = reference.window_batch(3)  # the short one: 37 = 3 x 12 + 1
    assert reference.sample_ids(3).tolist().count(NO_SAMPLE) == 11
    rows = [row for step in reference.micro_batch_batches(3) for part in step for row in part["labels"]]
    assert len(rows) == len(window["labels"]) == 12
    for row, wide in zip(rows, window["labels"], strict=True):
        kept = min(len(row), len(wide))
        assert row[:kept].tolist() == wide[:kept].tolist()
        assert (wide[kept:] == -100).all()
        assert (row[kept:] == -100).all()


@pytest.mark.parametrize("change", ["seed", "rule", "split", "prompts", "tokens"])
def test_another_seed_rule_split_or_content_is_told_apart(change: str) -> None:
    """Negative control: the comparison of the first test fails when one side follows another rule."""
    samples, batch = random_samples(37, padded=True), EffectiveBatch(2, 2, 3)
    [first, _] = streams_of(samples, batch, "short")
    changed = {
        "prompts": replace(samples, prompt_lengths=np.zeros_like(samples.prompt_lengths)),
        "tokens": replace(samples, tokens=samples.tokens + 1),
    }.get(change, samples)
    other = reference_of(
        changed,
        EffectiveBatch(2, 3, 2) if change == "split" else batch,
        "continue" if change == "rule" else "short",
        seed=1 if change == "seed" else 0,
    )
    window = 3  # the short one: 37 = 3 x 12 + 1
    theirs = first.window(window)
    assert not all(same(ours[0], fed) for ours, fed in zip(other.micro_batch_batches(window), theirs, strict=False))
    right = reference_of(samples, batch, "short")
    assert all(same(ours[0], fed) for ours, fed in zip(right.micro_batch_batches(window), theirs, strict=True))


def test_a_sample_that_was_left_out_is_refused_not_fed_empty() -> None:
    samples, batch = random_samples(37, padded=True), EffectiveBatch(1, 2, 2)
    needed = reference_of(samples, batch, "continue").sample_ids(0)
    lengths = np.where(np.isin(np.arange(37), needed), samples.lengths, 0)
    reference = reference_of(replace(samples, lengths=lengths), batch, "continue")
    assert same(reference.window_batch(0), reference_of(samples, batch, "continue").window_batch(0))
    with pytest.raises(ValueError, match="was left out of this case"):
        reference.window_batch(1)


def test_raggedness_counts_targets_not_tokens() -> None:
    ragged = raw_of(random_samples(37, padded=True))
    assert ragged.ragged
    assert not raw_of(random_samples(37, padded=False)).ragged
    # Lengths differ, targets do not: 5 - 2 = 4 - 1 = 3; a row's first token is no target with or without a prompt.
    level = replace(ragged, lengths=np.array([5, 4, 4, 0]), prompt_lengths=np.array([2, 1, 0, 0]))
    assert level.target_counts.tolist() == [3, 3, 3, 0]
    assert not level.ragged
    assert replace(level, prompt_lengths=np.array([2, 1, 2, 0])).ragged
