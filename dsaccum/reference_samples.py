"""The independent side: which sample is due where, and the batches of a window, made again from raw arrays.

The written rule. The order of an epoch ranks its samples by the raw 64-bit output of PCG64, seeded with the data seed
and, as spawn key, the epoch; of equal keys the lower sample comes first. Window s takes the next E = N W B entries:

    continue    of one endless stream: epoch 0, epoch 1, ...
    drop        of its epoch, which leaves out its last n mod E entries
    short       of its epoch, whose last window is filled up with rows that hold no sample

Within the window, entry (k W + r) B + j goes to micro-step k, rank r, row j.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dsaccum.reference import stream_position

NO_SAMPLE = -1
_NO_TARGET = -100


@dataclass(frozen=True)
class RawSamples:
    """Samples as plain arrays.

    Args:
        tokens: ids of all samples, [tokens].
        starts: where each sample begins in ``tokens``, [samples].
        lengths: tokens of each sample, [samples]; 0 for a sample that was left out because no window holds it.
        prompt_lengths: leading tokens of each sample that are no targets, [samples].
        padded: rows differ in length, are filled up on the right, and come with an attention mask.
        sequence_length: the longest that a row can be.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    padded: bool
    sequence_length: int

    @property
    def target_counts(self) -> np.ndarray:
        """Targets of each sample, [samples]: tokens behind the prompt, but never the first of the row."""
        return np.maximum(self.lengths - np.maximum(self.prompt_lengths, 1), 0)

    @property
    def ragged(self) -> bool:
        """Whether samples differ in their number of targets, so that micro-batches can weigh differently."""
        return len(np.unique(self.target_counts[self.lengths > 0])) > 1


class ReferenceSamples:
    """The samples of every window; windows, micro-steps, ranks and rows count from 0.

    Args:
        raw: the samples.
        seed: of the order.
        last_window: ``continue``, ``drop`` or ``short``.
        accumulation_steps: N.
        world_size: W.
        micro_batch: B.
        pad_token: id that fills up rows.
        before: effective batches of the windows that a run made before another split, or another effective batch, was
            asked for; windows count from the run's beginning.
    """

    def __init__(
        self,
        raw: RawSamples,
        *,
        seed: int,
        last_window: str,
        accumulation_steps: int,
        world_size: int,
        micro_batch: int,
        pad_token: int,
        before: Sequence[int] = (),
    ) -> None:
        self._raw, self._seed, self._last_window, self._pad_token = raw, seed, last_window, pad_token
        self._split = {"accumulation_steps": accumulation_steps, "world_size": world_size, "micro_batch": micro_batch}
        self._effective_batch = accumulation_steps * world_size * micro_batch
        self._before = tuple(before)
        self._epoch_order = lru_cache(maxsize=4)(self._sorted_epoch)
        self._start = lru_cache(maxsize=None)(self._walk_to)

    def sample_ids(self, window: int) -> np.ndarray:
        """The window's samples, [E], int64; ``NO_SAMPLE`` for a row that holds none."""
        return np.array([self._due(window, entry) for entry in range(self._effective_batch)], np.int64)

    def micro_batch_ids(self, window: int) -> np.ndarray:
        """The same by micro-step and rank, [N, W, B]."""
        ids, split = self.sample_ids(window), self._split
        placed = np.empty((split["accumulation_steps"], split["world_size"], split["micro_batch"]), np.int64)
        for step, rank, row in np.ndindex(placed.shape):
            placed[step, rank, row] = ids[stream_position(0, step, rank, row, **split)]
        return placed

    def window_batch(self, window: int) -> dict[str, Tensor]:
        """All E rows as one batch of one width: the big batch.

        Returns:
            ``input_ids`` and ``labels`` [E, T], for padded samples ``attention_mask`` too; all int64.

        Raises:
            ValueError: a sample of this window was left out of the raw arrays.
        """
        return self._batch(self.sample_ids(window).tolist())

    def micro_batch_batches(self, window: int) -> list[list[dict[str, Tensor]]]:
        """Micro-batch [k][r] of micro-step k and rank r, each at its own width: its longest row's, see ``_width``."""
        return [[self._batch(rows) for rows in step] for step in self.micro_batch_ids(window).tolist()]

    def _sorted_epoch(self, epoch: int) -> np.ndarray:
        bits = np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=(epoch,)))
        samples = np.arange(len(self._raw.starts))
        return np.lexsort((samples, bits.random_raw(len(samples))))  # by key; equal keys by sample

    def _due(self, window: int, entry: int) -> int:
        count, start = len(self._raw.starts), self._start(window)
        if self._last_window == "continue":
            epoch, place = divmod(start + entry, count)
        else:
            epoch, place = divmod(start, count)
            place += entry
        return int(self._epoch_order(epoch)[place]) if place < count else NO_SAMPLE

    def _walk_to(self, window: int) -> int:
        """Where a window starts in all epochs' orders, one after the other: window by window from the beginning."""
        position = 0
        for size in [*self._before[:window], *[self._effective_batch] * (window - len(self._before))]:
            position = self._behind(self._begun(position, size), size)
        size = self._before[window] if window < len(self._before) else self._effective_batch
        return self._begun(position, size)

    def _begun(self, position: int, size: int) -> int:
        """``drop``: a window that doesn't fit into its epoch begins with the next one."""
        left = len(self._raw.starts) - position % len(self._raw.starts)
        return position + left if self._last_window == "drop" and size > left else position

    def _behind(self, position: int, size: int) -> int:
        """``short``: a window ends with its epoch, if not before."""
        left = len(self._raw.starts) - position % len(self._raw.starts)
        return position + (min(size, left) if self._last_window == "short" else size)

    def _batch(self, samples: list[int]) -> dict[str, Tensor]:
        rows = [self._row(sample) for sample in samples]
        width = self._width(len(tokens) for tokens, _ in rows)
        input_ids = torch.full((len(rows), width), self._pad_token, dtype=torch.int64)
        labels = torch.full((len(rows), width), _NO_TARGET, dtype=torch.int64)
        attention_mask = torch.zeros(len(rows), width, dtype=torch.int64)
        for index, (tokens, prompt) in enumerate(rows):
            input_ids[index, : len(tokens)] = tokens
            labels[index, prompt : len(tokens)] = tokens[prompt:]
            # Attention over nothing at all is undefined: a row without a sample shows its first position.
            attention_mask[index, : max(len(tokens), 1)] = 1
        batch = {"input_ids": input_ids, "labels": labels}
        return {**batch, "attention_mask": attention_mask} if self._raw.padded else batch

    def _row(self, sample: int) -> tuple[Tensor, int]:
        """A sample's tokens and the length of its prompt."""
        if sample == NO_SAMPLE:
            return torch.empty(0, dtype=torch.int64), 0
        start, length = int(self._raw.starts[sample]), int(self._raw.lengths[sample])
        if length == 0:
            raise ValueError(f"sample {sample} was left out of this case")
        tokens = torch.tensor(self._raw.tokens[start : start + length].tolist(), dtype=torch.int64)
        return tokens, int(self._raw.prompt_lengths[sample])

    def _width(self, lengths: Iterable[int]) -> int:
        """The longest row rounded up to a multiple of 8, at most ``sequence_length``; packed rows have just that."""
        if not self._raw.padded:
            return self._raw.sequence_length
        longest = max([1, *lengths])
        return min(longest + -longest % 8, self._raw.sequence_length)
