"""The order of samples: a function of seed and epoch alone, never of how the effective batch is split."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final, Literal

import numpy as np

from dsaccum.batch import EffectiveBatch
from dsaccum.config.errors import ConfigError

FILLER: Final = -1
"""Stands for a row without a sample: it holds no target."""


def epoch_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: a permutation of ``range(num_samples)``, [num_samples], int64.

    Sorts the raw output of PCG64, which NumPy promises never to change (unlike ``Generator.permutation``), so that
    a run resumes in the same order on another platform and with another version of NumPy.
    """
    keys = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(num_samples)
    return np.argsort(keys, kind="stable").astype(np.int64)


class WindowOrder:
    """Which samples each window holds; windows count from 0 and can be asked for in any order.

    Args:
        num_samples: samples of one epoch (n).
        effective_batch: samples of one window (E).
        last_window: what becomes of the n mod E samples at an epoch's end. ``continue``: the window goes on into the
            next epoch's order. ``drop``: they're left out of this epoch. ``short``: the window is filled up with
            ``FILLER``.
        seed: of the order.
        source_file: the experiment's file, for messages.
        first_window: the first window of this effective batch, where it was changed in mid-run.
        position: samples of all epochs before it.

    Raises:
        ConfigError: ``drop`` with fewer samples than one window: every epoch would be empty.
    """

    def __init__(
        self,
        num_samples: int,
        effective_batch: int,
        last_window: Literal["continue", "drop", "short"],
        seed: int,
        source_file: str | Path | None = None,
        *,
        first_window: int = 0,
        position: int = 0,
    ) -> None:
        self.num_samples, self.effective_batch, self.last_window = num_samples, effective_batch, last_window
        self._first_window, self._position = first_window, position
        self._epoch_windows = self._windows_in(num_samples)
        if last_window == "drop" and not self._epoch_windows:
            raise ConfigError(
                f"{num_samples} samples are fewer than the effective batch of {effective_batch}: nothing would be left",
                source=source_file,
                key="data.last_window",
                value="drop",
                fix="last_window: continue, or a smaller effective batch",
            )
        # A window reaches into the next epoch at most as often as it is long; two epochs serve the usual case.
        self._epoch = lru_cache(maxsize=2)(lambda epoch: epoch_order(num_samples, seed, epoch))

    @property
    def windows_per_epoch(self) -> float:
        """Optimizer steps of one epoch: n / E for ``continue``, a whole number for ``drop`` and ``short``."""
        return self.num_samples / self.effective_batch if self.last_window == "continue" else self._epoch_windows

    def sample_ids(self, window: int) -> np.ndarray:
        """The window's samples in the order of the effective batch, [E], int64; ``FILLER`` where there is none."""
        start = self.position_of(window)
        if self.last_window == "continue":
            return self._slice_of_stream(start)
        epoch, offset = divmod(start, self.num_samples)
        ids = np.full(self.effective_batch, FILLER, np.int64)
        present = self._epoch(epoch)[offset : offset + self.effective_batch]
        ids[: len(present)] = present
        return ids

    def position_of(self, window: int) -> int:
        """Samples of all epochs before a window, those included that an epoch's end left out."""
        if window < self._first_window:
            raise IndexError(f"window {window}: windows count from {self._first_window}")
        windows = window - self._first_window
        if self.last_window == "continue":
            return self._position + windows * self.effective_batch
        epoch, offset = divmod(self._position, self.num_samples)
        in_begun_epoch = self._windows_in(self.num_samples - offset)
        if windows < in_begun_epoch:
            return self._position + windows * self.effective_batch
        epochs, rest = divmod(windows - in_begun_epoch, self._epoch_windows)
        return (epoch + 1 + epochs) * self.num_samples + rest * self.effective_batch

    def _windows_in(self, samples: int) -> int:
        """Windows of one epoch's last so many samples."""
        whole, left_over = divmod(samples, self.effective_batch)
        return whole + (1 if left_over and self.last_window == "short" else 0)

    def _slice_of_stream(self, start: int) -> np.ndarray:
        """E entries from position ``start`` of all epochs' orders, one after the other."""
        first, offset = divmod(start, self.num_samples)
        epochs = -(-(offset + self.effective_batch) // self.num_samples)
        orders = np.concatenate([self._epoch(first + index) for index in range(epochs)])
        return orders[offset : offset + self.effective_batch]


def rank_rows(window_ids: np.ndarray, rank: int, batch: EffectiveBatch) -> np.ndarray:
    """One rank's rows of a window, [N, B]: entry (k W + r) B + j goes to micro-step k, rank r, row j."""
    return window_ids.reshape(batch.accumulation_steps, batch.world_size, batch.micro_batch)[:, rank]
