"""Batches: shapes, masks and filler rows, on each rank.

Run: pytest tests/data/test_stream.py
Not covered: what a model makes of the batches (see the tests of the engine).
"""

from __future__ import annotations

import pytest
import torch

from dsaccum.batch import EffectiveBatch
from dsaccum.config.experiment import DataConfig
from dsaccum.data import FILLER, NOT_A_TARGET, WindowOrder, WindowStream, collate, held_out_batches, load_tokenizer
from dsaccum.data.documents import Document
from dsaccum.data.samples import Samples, build_samples

BYTES = load_tokenizer("bytes")
PAD = BYTES.pad_token


def ragged(count: int, sequence_length: int = 32) -> Samples:
    """Sample i holds i + 1 bytes and its end."""
    documents = [Document("x" * (number + 1)) for number in range(count)]
    return build_samples(documents, BYTES, DataConfig(packing="padded", sequence_length=sequence_length))


def packed(count: int, sequence_length: int = 4) -> Samples:
    text = "".join(chr(97 + number % 26) for number in range(count * sequence_length))
    return build_samples([Document(text)], BYTES, DataConfig(sequence_length=sequence_length))


def streams(samples: Samples, batch: EffectiveBatch, last_window: str) -> list[WindowStream]:
    order = WindowOrder(len(samples), batch.total, last_window, seed=0)
    return [WindowStream(samples, order, batch, rank, PAD) for rank in range(batch.world_size)]


def test_packed_micro_batches_are_the_samples_in_full() -> None:
    samples, batch = packed(20), EffectiveBatch(world_size=2, accumulation_steps=3, micro_batch=2)
    for stream in streams(samples, batch, "continue"):
        micro_batches = stream.window(1)
        assert len(micro_batches) == 3
        for micro_batch, ids in zip(micro_batches, stream.sample_ids(1), strict=True):
            assert set(micro_batch) == {"input_ids", "labels"}
            for row, sample in enumerate(ids):
                assert micro_batch["input_ids"][row].tolist() == samples[sample][0].tolist()
                assert micro_batch["labels"][row].tolist() == samples[sample][1].tolist()


def test_window_holds_the_same_targets_however_it_is_split() -> None:
    samples = ragged(30)

    def targets(batch: EffectiveBatch) -> list[int]:
        rows = [
            int((row[1:] != NOT_A_TARGET).sum())
            for step in zip(*(stream.window(2) for stream in streams(samples, batch, "short")), strict=True)
            for micro_batch in step
            for row in micro_batch["labels"]
        ]
        return rows

    whole = targets(EffectiveBatch(1, 1, 12))
    assert sum(whole) > 0
    assert whole.count(0) == 6, "30 samples in windows of 12: six rows of filler"
    assert targets(EffectiveBatch(2, 3, 2)) == targets(EffectiveBatch(3, 2, 2)) == whole


def test_padding_is_never_seen_and_never_a_target() -> None:
    samples = ragged(5)
    batch = collate(samples, [0, 4], PAD)
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert all(field.shape == (2, 8) and field.dtype == torch.int64 for field in batch.values())
    assert batch["attention_mask"].sum(1).tolist() == [2, 6]
    assert (batch["labels"][batch["attention_mask"] == 0] == NOT_A_TARGET).all()
    assert (batch["input_ids"][batch["attention_mask"] == 0] == PAD).all()
    assert batch["labels"][0, :2].tolist() == samples[0][1].tolist()


@pytest.mark.parametrize(("longest", "sequence_length", "width"), [(7, 32, 8), (8, 32, 16), (20, 21, 21), (1, 4, 4)])
def test_width_is_a_multiple_of_8_up_to_the_sequence_length(longest: int, sequence_length: int, width: int) -> None:
    samples = ragged(longest, sequence_length)  # the longest sample holds longest + 1 tokens
    assert collate(samples, [longest - 1], PAD)["input_ids"].shape == (1, width)


@pytest.mark.parametrize("samples", [ragged(3), packed(3)], ids=["padded", "packed"])
def test_filler_rows_hold_no_target_and_can_be_attended_to(samples: Samples) -> None:
    for ids in ([1, FILLER], [FILLER, FILLER]):
        batch = collate(samples, ids, PAD)
        assert (batch["labels"][1] == NOT_A_TARGET).all()
        assert (batch["input_ids"][1] == PAD).all()
        if samples.padded:
            assert batch["attention_mask"][1].tolist() == [1] + [0] * (batch["labels"].shape[1] - 1)


@pytest.mark.parametrize(("count", "limit", "batches"), [(7, 100, 2), (8, 100, 2), (9, 100, 3), (9, 3, 1)])
def test_held_out_batches_show_each_sample_once_and_are_as_many_on_each_rank(count, limit, batches) -> None:
    samples = packed(count)
    by_rank = [list(held_out_batches(samples, 2, rank, 2, limit, PAD)) for rank in range(2)]
    assert [len(of_rank) for of_rank in by_rank] == [batches, batches]
    rows = [row for step in zip(*by_rank, strict=True) for batch in step for row in batch["input_ids"].tolist()]
    shown = [row for row in rows if row != [PAD] * 4]
    assert shown == [samples[index][0].tolist() for index in range(min(count, limit))]


def test_an_order_made_for_other_samples_is_refused() -> None:
    batch = EffectiveBatch(1, 2, 2)
    with pytest.raises(ValueError, match="the order is for 5 samples in windows of 4, not for 3 in windows of 4"):
        WindowStream(packed(3), WindowOrder(5, 4, "continue", seed=0), batch, 0, PAD)
