"""Effective-batch arithmetic: hand-worked numbers, and properties over random ones.

Run with ``pytest tests/batch``. Not covered: what the keys are called in a file (tests/config).
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsaccum.batch import (
    EffectiveBatch,
    is_update_boundary,
    micro_batch_weights,
    resolve_batch_triangle,
    slice_micro_batch,
)

small = st.integers(1, 12)


@given(small, small, small)
def test_any_two_of_the_triangle_give_the_third(ranks, steps, micro_batch):
    whole = EffectiveBatch(ranks, steps, micro_batch)
    assert whole.total == ranks * steps * micro_batch
    assert resolve_batch_triangle(ranks, accumulation_steps=steps, micro_batch=micro_batch) == whole
    assert resolve_batch_triangle(ranks, total=whole.total, micro_batch=micro_batch) == whole
    assert resolve_batch_triangle(ranks, total=whole.total, accumulation_steps=steps) == whole
    assert resolve_batch_triangle(ranks, total=whole.total, accumulation_steps=steps, micro_batch=micro_batch) == whole


@given(small, small, st.integers(1, 500))
def test_a_total_is_kept_exactly_or_refused(ranks, steps, total):
    try:
        batch = resolve_batch_triangle(ranks, total=total, accumulation_steps=steps)
    except ValueError as error:
        assert total % (ranks * steps) != 0
        nearest = [int(word) for word in str(error).split("nearest: ")[1].split(" or ")]
        assert all(number % (ranks * steps) == 0 and abs(number - total) < ranks * steps for number in nearest)
    else:
        assert batch.total == total


@pytest.mark.parametrize(
    ("ranks", "given_numbers", "message"),
    [
        (
            2,
            {"total": 10, "accumulation_steps": 4},
            "10 is not 2 ranks x 4 steps x B for any whole B; nearest: 8 or 16",
        ),
        (2, {"total": 10, "micro_batch": 4}, "10 is not 2 ranks x N steps x 4 for any whole N; nearest: 8 or 16"),
        (4, {"total": 3, "micro_batch": 1}, "3 is not 4 ranks x N steps x 1 for any whole N; nearest: 4"),
        (1, {"total": 9, "accumulation_steps": 2, "micro_batch": 4}, "9 is not 1 rank x 2 steps x 4 = 8; write 8"),
        (1, {}, "no batch size is given"),
        (1, {"total": 8}, 'train_batch_size 8 alone .* "gradient_accumulation_steps": N'),
        (1, {"micro_batch": 8}, '8 alone .* "gradient_accumulation_steps": N'),
        (1, {"accumulation_steps": 8}, '8 alone .* "train_micro_batch_size_per_gpu": B'),
    ],
)
def test_refusals_name_the_numbers(ranks, given_numbers, message):
    with pytest.raises(ValueError, match=message):
        resolve_batch_triangle(ranks, **given_numbers)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, 2.5, "4", float("nan")])
@pytest.mark.parametrize("name", ["total", "accumulation_steps", "micro_batch"])
def test_only_positive_whole_numbers_count(name, value):
    numbers = {"total": 8, "accumulation_steps": 4, "micro_batch": 2} | {name: value}
    with pytest.raises(ValueError, match="must be"):
        resolve_batch_triangle(1, **numbers)
    with pytest.raises(ValueError, match="world size"):
        resolve_batch_triangle(value, total=8, micro_batch=2)
    with pytest.raises(ValueError, match="must be"):
        EffectiveBatch(1, value, 1)


@given(small, small)
def test_slices_put_together_are_the_batch(steps, micro_batch):
    rows = steps * micro_batch
    batch = {"input_ids": torch.arange(rows * 3).reshape(rows, 3), "lengths": np.arange(rows)}
    slices = [slice_micro_batch(batch, index, steps) for index in range(steps)]
    assert all(len(piece["lengths"]) == micro_batch for piece in slices)
    assert torch.equal(torch.cat([piece["input_ids"] for piece in slices]), batch["input_ids"])
    # Row i of every field stays together: the second field counts the first one's rows.
    assert all(torch.equal(piece["input_ids"][:, 0], torch.tensor(piece["lengths"] * 3)) for piece in slices)


def test_a_slice_shares_the_memory_of_its_batch():
    batch = {"x": torch.zeros(4)}
    slice_micro_batch(batch, 1, 2)["x"][0] = 5
    assert batch["x"].tolist() == [0, 0, 5, 0]


@pytest.mark.parametrize(
    ("batch", "index", "steps", "error", "message"),
    [
        ({"x": torch.zeros(4), "y": torch.zeros(3)}, 0, 2, ValueError, "not aligned.*x 4, y 3"),
        ({"x": torch.zeros(5)}, 0, 2, ValueError, "5 rows do not divide into 2"),
        ({"x": torch.zeros(4)}, 2, 2, IndexError, "micro-batch 2 of a window of 2"),
        ({"x": torch.zeros(4)}, -1, 2, IndexError, "micro-batch -1"),
        ({"x": torch.zeros(4)}, 0, 0, ValueError, "at least 1"),
        ({"x": torch.zeros(4)}, 0.0, 2, ValueError, "whole number"),
        ({"x": torch.tensor(4.0)}, 0, 1, ValueError, "'x' has no rows"),
        ({"x": None}, 0, 1, ValueError, "'x' has no rows"),
        ({"x": torch.zeros(0)}, 0, 1, ValueError, "0 rows do not divide"),
        ({}, 0, 1, ValueError, "no field"),
    ],
)
def test_slices_that_mean_nothing_are_refused(batch, index, steps, error, message):
    with pytest.raises(error, match=message):
        slice_micro_batch(batch, index, steps)


def test_the_boundary_is_the_last_micro_step_of_each_window():
    assert [is_update_boundary(completed, 3) for completed in range(8)] == [
        False, False, False, True, False, False, True, False,
    ]  # fmt: skip
    assert all(is_update_boundary(completed, 1) for completed in range(1, 4))


@given(st.integers(0, 1000), small)
def test_boundaries_so_far_are_whole_windows(completed, steps):
    assert sum(is_update_boundary(step, steps) for step in range(1, completed + 1)) == completed // steps


@pytest.mark.parametrize(("completed", "steps"), [(-1, 2), (1, 0), (1, -2), (1.0, 2), (True, 2), (1, True)])
def test_boundary_of_no_count_is_refused(completed, steps):
    with pytest.raises(ValueError, match="must"):
        is_update_boundary(completed, steps)


def test_weights_are_shares_of_the_windows_targets():
    assert micro_batch_weights([1, 2, 5]) == [1 / 8, 2 / 8, 5 / 8]
    assert micro_batch_weights([7, 7, 7, 7]) == [0.25] * 4
    assert micro_batch_weights([0, 3]) == [0.0, 1.0]


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20).filter(any))
def test_weights_are_exact_to_the_last_bit(counts):
    assert micro_batch_weights(counts) == [float(Fraction(count, sum(counts))) for count in counts]


@pytest.mark.parametrize("counts", [[], [0, 0], [1, -1, 2], [1.5, 2], [True, 1]])
def test_weights_without_targets_are_refused(counts):
    with pytest.raises(ValueError, match="target"):
        micro_batch_weights(counts)
