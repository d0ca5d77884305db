"""Single rows that come twice in a window: told, and held to be wrong only where copies in the data can't explain it.

Run: pytest tests/watch/test_rows_fed.py; -m slow for a script on two ranks. Not covered: rows that share a part only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsaccum.watch.rows_fed import FedTwice, RowPrints, fed_twice, prints_of, rows_notes
from tests.watch.running import on_ranks, only_window

LENGTH = 16


def rows(*numbers: int, vocabulary: int = 60) -> Tensor:
    drawn = [
        torch.randint(3, 3 + vocabulary, (LENGTH,), generator=torch.Generator().manual_seed(each)) for each in numbers
    ]
    return torch.stack(drawn)


def prints(tokens: Tensor, **more: Tensor) -> RowPrints:
    return prints_of((), {"input_ids": tokens, **more})


def found(*ranks: list[list[int]]) -> FedTwice:
    """Ranks of micro-steps of row numbers."""
    fed = [[prints(rows(*step)) for step in rank] for rank in ranks]
    return fed_twice(fed, [list(range(len(rank))) for rank in ranks])


def test_rows_of_their_own_pass() -> None:
    twice = found([[0, 1], [2, 3]], [[4, 5], [6, 7]])
    assert (twice.rows, twice.on_ranks, twice.within, twice.wrong) == (8, 0, 0, False)
    assert rows_notes(twice) == []


def test_a_row_on_two_ranks_is_told_and_may_be_in_the_data_twice() -> None:
    twice = found([[0, 1], [2, 3]], [[4, 5], [1, 7]])
    assert (twice.on_ranks, twice.within, twice.wrong) == (1, 0, False)
    [note] = rows_notes(twice)
    assert "1 of 8 rows came to more than one rank, one in micro-step 1 of rank 0 and micro-step 2 of rank 1" in note


def test_ranks_that_share_all_their_rows_in_another_order_are_wrong() -> None:
    one, other = [[0, 1], [2, 3], [4, 5], [6, 7]], [[7, 2], [5, 0], [1, 6], [3, 4]]
    assert found(one, other).wrong
    some = [[7, 2], [5, 0], [11, 16], [13, 14]]
    assert not found(one, some).wrong
    assert not found([*one, [0, 9]], [*other, [10, 11]]).wrong  # where a rank has copies, too, the data has them


def test_a_row_in_two_micro_steps_of_a_rank_is_told() -> None:
    twice = found([[0, 1], [2, 0]])
    assert (twice.within, twice.wrong) == (1, False)
    assert "more than one micro-step" in rows_notes(twice)[0]
    again = fed_twice([[prints(rows(0, 1))] * 2], [[0, 0]])  # two backward passes of one micro-batch
    assert (again.rows, again.within) == (2, 0)


def test_padding_makes_no_row_another_and_no_rows_the_same() -> None:
    short, long = rows(0, 1)[:, :12], torch.zeros(2, LENGTH, dtype=torch.long)
    long[:, :12] = short
    mask = (long != 0).long()
    assert prints(long, attention_mask=mask, labels=torch.where(mask == 1, long, -100)) == prints(
        short, attention_mask=torch.ones_like(short), labels=short
    )
    assert prints(long) == prints(torch.cat([long, long[:, -1:]], 1))  # without a mask, too
    assert prints(torch.zeros(2, LENGTH, dtype=torch.long)) == (None, None)


def test_rows_that_hold_little_or_have_other_labels_are_not_taken_for_the_same() -> None:
    assert prints(rows(0, vocabulary=2)) == (None,)
    assert prints(rows(0)[:, :4]) == (None,)
    assert prints(rows(0), labels=torch.tensor([0])) != prints(rows(0), labels=torch.tensor([1]))
    pictures = torch.randn(2, 3, 4, 4)
    assert None not in prints_of((pictures,), {})
    assert prints_of((pictures,), {}) != prints_of((pictures.flip(0),), {})


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_shuffle_all_rows_themselves_are_noted(tmp_path: Path) -> None:
    cases = [["plain_loop", "--rows", "16"], ["plain_loop", "--rows", "16", "--mistake", "shuffled-apart"]]
    right, wrong = (only_window(each) for each in on_ranks(2, cases, tmp_path))
    assert not any("came to more than one rank" in note for note in right.notes)
    assert any("came to more than one rank" in note for note in wrong.notes)
