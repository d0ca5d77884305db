"""The order of samples: a function of seed and epoch alone, the same for every way of splitting the effective batch.

Run: pytest tests/data/test_order.py
Not covered: other platforms and versions of NumPy, except through the fixed orders below.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsaccum.batch import EffectiveBatch
from dsaccum.config.errors import ConfigError
from dsaccum.data import FILLER, WindowOrder, epoch_order, rank_rows

sizes = st.integers(1, 60)
small = st.integers(1, 4)
modes = st.sampled_from(["continue", "drop", "short"])


def seen(order: WindowOrder, windows: int) -> np.ndarray:
    """All samples of the first windows, without filler, in order."""
    ids = np.concatenate([order.sample_ids(window) for window in range(windows)])
    return ids[ids != FILLER]


@given(sizes, st.integers(0, 2**70), st.integers(0, 1000))
def test_an_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(num_samples, seed, epoch)) == list(range(num_samples))


def test_the_order_is_fixed_for_all_time() -> None:
    # A run that resumes elsewhere relies on these very numbers.
    assert epoch_order(8, 0, 0).tolist() == [6, 3, 1, 4, 5, 2, 7, 0]
    assert epoch_order(8, 0, 1).tolist() == [1, 3, 6, 2, 0, 7, 5, 4]
    assert epoch_order(8, 1, 0).tolist() == [4, 6, 1, 3, 2, 0, 5, 7]


@settings(deadline=None)
@given(sizes, small, small, small, modes, st.integers(0, 9))
def test_ranks_and_micro_steps_together_see_the_window_as_mapped(n, world_size, steps, micro_batch, mode, window):
    batch = EffectiveBatch(world_size, steps, micro_batch)
    if mode == "drop" and n < batch.total:
        return
    ids = WindowOrder(n, batch.total, mode, seed=3).sample_ids(window)
    assert ids.shape == (batch.total,)
    rows = [rank_rows(ids, rank, batch) for rank in range(world_size)]
    for k, r, j in itertools.product(range(steps), range(world_size), range(micro_batch)):
        assert rows[r][k, j] == ids[(k * world_size + r) * micro_batch + j]
    assert sorted(np.concatenate(rows, axis=None)) == sorted(ids)


@given(sizes, modes, st.integers(0, 5))
def test_windows_are_the_same_for_every_factorisation(n: int, mode: str, window: int) -> None:
    splits = [EffectiveBatch(*split) for split in ((1, 12, 1), (1, 1, 12), (2, 3, 2), (3, 4, 1), (4, 1, 3))]
    if mode == "drop" and n < 12:
        return
    per_micro_step_order = []
    for batch in splits:
        ids = WindowOrder(n, batch.total, mode, seed=0).sample_ids(window)
        rows = np.stack([rank_rows(ids, rank, batch) for rank in range(batch.world_size)], axis=1)
        per_micro_step_order.append(rows.reshape(-1).tolist())
    assert all(order == per_micro_step_order[0] for order in per_micro_step_order)


@settings(deadline=None)
@given(sizes, st.integers(1, 20), modes)
def test_no_sample_is_repeated_within_an_epoch(n: int, effective_batch: int, mode: str) -> None:
    if mode == "drop" and n < effective_batch:
        return
    order = WindowOrder(n, effective_batch, mode, seed=5)
    per_epoch = {"continue": n, "drop": n // effective_batch * effective_batch, "short": n}[mode]
    windows = -(-3 * n // effective_batch) if mode == "continue" else 3 * int(order.windows_per_epoch)
    ids = seen(order, windows)[: 3 * per_epoch]
    for epoch in range(3):
        of_epoch = ids[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert len(set(of_epoch)) == len(of_epoch) == per_epoch
        assert of_epoch.tolist() == epoch_order(n, 5, epoch)[:per_epoch].tolist()


@given(sizes, st.integers(1, 20), modes, st.permutations(range(8)))
def test_windows_can_be_asked_for_in_any_order(n: int, effective_batch: int, mode: str, shuffled: list[int]) -> None:
    if mode == "drop" and n < effective_batch:
        return
    used = WindowOrder(n, effective_batch, mode, seed=0)
    for window in shuffled:
        fresh = WindowOrder(n, effective_batch, mode, seed=0)
        assert (used.sample_ids(window) == fresh.sample_ids(window)).all()


def test_short_fills_up_the_last_window_of_each_epoch_only() -> None:
    order = WindowOrder(10, 4, "short", seed=0)
    fillers = [int((order.sample_ids(window) == FILLER).sum()) for window in range(6)]
    assert fillers == [0, 0, 2, 0, 0, 2]
    assert order.sample_ids(2)[2:].tolist() == [FILLER, FILLER]


def test_windows_per_epoch() -> None:
    counts = [WindowOrder(10, 4, mode, seed=0).windows_per_epoch for mode in ("continue", "drop", "short")]
    assert counts == [2.5, 2, 3]
    assert WindowOrder(8, 4, "short", seed=0).windows_per_epoch == 2, "no window of filler alone"


def test_seed_and_epoch_each_change_the_order() -> None:
    orders = [tuple(epoch_order(50, seed, epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


def test_drop_with_less_than_one_window_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        WindowOrder(3, 4, "drop", seed=0, source_file="exp.yaml")
    assert str(caught.value).startswith('exp.yaml: data.last_window = "drop": 3 samples are fewer than')


def test_windows_before_the_first_are_refused() -> None:
    with pytest.raises(IndexError, match="windows count from 0"):
        WindowOrder(3, 1, "continue", seed=0).sample_ids(-1)
