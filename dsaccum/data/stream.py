"""Batches: the micro-batches of a window on one rank, and those of the held-out samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch

from dsaccum.batch import EffectiveBatch
from dsaccum.data.order import FILLER, WindowOrder, rank_rows
from dsaccum.data.samples import NOT_A_TARGET, Samples

_WIDTH_STEP: Final = 8  # widths in multiples of 8 suit matrix units, and allocators see fewer different shapes


class WindowStream:
    """One rank's micro-batches, window by window; windows count from 0 and can be asked for in any order.

    Args:
        samples: the training samples.
        order: which samples each window holds.
        batch: how a window is split over ranks and micro-steps.
        rank: this process's data-parallel rank, from 0.
        pad_token: id that fills up rows.

    Raises:
        ValueError: the order was made for another number of samples or another effective batch.
    """

    def __init__(self, samples: Samples, order: WindowOrder, batch: EffectiveBatch, rank: int, pad_token: int) -> None:
        if (order.num_samples, order.effective_batch) != (len(samples), batch.total):
            raise ValueError(
                f"the order is for {order.num_samples} samples in windows of {order.effective_batch}, "
                f"not for {len(samples)} in windows of {batch.total}"
            )
        self.samples, self.order, self.batch, self.rank, self.pad_token = samples, order, batch, rank, pad_token

    def split_as(self, batch: EffectiveBatch) -> WindowStream:
        """The same windows, split otherwise."""
        return WindowStream(self.samples, self.order, batch, self.rank, self.pad_token)

    def sample_ids(self, window: int) -> np.ndarray:
        """Samples of a window on this rank, [N, B], int64; ``FILLER`` for rows without a sample."""
        return rank_rows(self.order.sample_ids(window), self.rank, self.batch)

    def samples_in(self, window: int) -> int:
        """How many of this rank's rows in a window hold a sample."""
        return int((self.sample_ids(window) != FILLER).sum())

    def window(self, index: int) -> list[dict[str, torch.Tensor]]:
        """The N micro-batches of a window on this rank; see ``collate`` for what each holds."""
        return [collate(self.samples, ids, self.pad_token) for ids in self.sample_ids(index)]


def collate(samples: Samples, sample_ids: Sequence[int] | np.ndarray, pad_token: int) -> dict[str, torch.Tensor]:
    """Put samples into one batch of B rows, B = ``len(sample_ids)``; padding goes to the right.

    Returns:
        ``input_ids`` and ``labels`` (-100 where there's no target), and for padded samples ``attention_mask`` (1 for
        tokens, 0 for padding); each [B, T] int64. T is ``sequence_length`` for packed samples, else the longest row
        rounded up to a multiple of 8. A ``FILLER`` row is all padding and has no target.
    """
    width = _width(samples, sample_ids)
    input_ids = np.full((len(sample_ids), width), pad_token, np.int64)
    labels = np.full_like(input_ids, NOT_A_TARGET)
    attention_mask = np.zeros_like(input_ids)
    # A row in which nothing is visible, as a filler would be, makes some attention implementations return NaN.
    attention_mask[:, 0] = 1
    for row, sample in enumerate(sample_ids):
        if sample != FILLER:
            length = samples.lengths[sample]
            input_ids[row, :length], labels[row, :length] = samples[sample]
            attention_mask[row, :length] = 1
    fields = {"input_ids": input_ids, "labels": labels}
    if samples.padded:
        fields["attention_mask"] = attention_mask
    return {name: torch.from_numpy(field) for name, field in fields.items()}


def held_out_batches(
    samples: Samples, micro_batch: int, rank: int, world_size: int, limit: int, pad_token: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The first ``limit`` (at least 1) held-out samples, or all if there are fewer, in one rank's micro-batches.

    Sample (k W + r) B + j goes to batch k, rank r, row j. Every rank gets the same number of batches, so that ranks
    can evaluate in step; the last ones are filled up with ``FILLER`` rows.
    """
    count = min(limit, len(samples))
    batches = -(-count // (world_size * micro_batch))
    batch = EffectiveBatch(world_size, batches, micro_batch)
    ids = np.full(batch.total, FILLER, np.int64)
    ids[:count] = np.arange(count)
    return (collate(samples, row_ids, pad_token) for row_ids in rank_rows(ids, rank, batch))


def _width(samples: Samples, sample_ids: Sequence[int] | np.ndarray) -> int:
    if not samples.padded:
        return samples.sequence_length
    longest = max((int(samples.lengths[sample]) for sample in sample_ids if sample != FILLER), default=1)
    return min(-(-longest // _WIDTH_STEP) * _WIDTH_STEP, samples.sequence_length)
