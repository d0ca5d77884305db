"""Whether targets belong to their inputs: every right way of making targets passes, rows that were mixed up do not.

Run: pytest tests/watch/test_alignment.py. Not covered: rows of fewer than 6 targets, which are never called wrong.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsaccum.watch.alignment import rows_misaligned
from dsaccum.watch.tokens import TokenReading, read_tokens
from tests.watch.running import only_window, watched

ROWS, LENGTH, VOCABULARY = 4, 24, 50


def stream(seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH + 3), generator=torch.Generator().manual_seed(seed))


def read(targets: Tensor, given: dict[str, Tensor]) -> TokenReading:
    """Of a mean over all targets but -100."""
    torch.manual_seed(1)
    logits = torch.randn(ROWS, targets.shape[1], VOCABULARY, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    assert logits.grad is not None
    return read_tokens(logits.detach(), logits.grad, given, ())


def packed(targets: Tensor) -> Tensor:
    """Documents of 8 tokens, none of which predicts the next one's first."""
    targets = targets.clone()
    targets[:, 7::8] = -100
    return targets


def corrupted(inputs: Tensor) -> Tensor:
    return torch.where(torch.rand(inputs.shape, generator=torch.Generator().manual_seed(4)) < 0.3, 1, inputs)


def right_ways() -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    text = stream()
    x, y = text[:, :LENGTH], text[:, 1 : LENGTH + 1]
    masked = torch.full_like(x, -100)
    masked[:, ::3] = x[:, ::3]
    return {
        "shifted before": (y, {"input_ids": x}),
        "shifted before, as labels": (y, {"input_ids": x, "labels": y}),
        "shifted after": (torch.cat([x[:, 1:], torch.full((ROWS, 1), -100)], 1), {"input_ids": x, "labels": x}),
        "two tokens on": (text[:, 2 : LENGTH + 2], {"input_ids": x}),
        "packed": (packed(y), {"input_ids": x}),
        "corrupted inputs": (y, {"input_ids": corrupted(x)}),
        "masked": (masked, {"input_ids": torch.where(masked != -100, 1, x)}),
        "translated": (stream(9)[:, :LENGTH], {"input_ids": x}),
        "soft prompts": (torch.cat([torch.full((ROWS, 3), -100), y], 1), {"input_ids": x}),
        "the same row twice": (y[[0, 0, 2, 3]], {"input_ids": x[[0, 0, 2, 3]]}),
    }


@pytest.mark.parametrize("way", right_ways())
def test_right_ways_of_making_targets_pass(way: str) -> None:
    targets, given = right_ways()[way]
    reading = read(targets, given)
    assert rows_misaligned(reading.alignments) == 0
    assert reading.due == int((targets != -100).sum())
    assert (reading.unweighted, reading.uncalled, reading.padding) == (0, 0, [])


@pytest.mark.parametrize("as_labels", [False, True])
def test_targets_of_other_rows_are_found(as_labels: bool) -> None:
    text = stream()
    x, y = text[:, :LENGTH], text[:, 1 : LENGTH + 1]
    mixed = y.roll(1, 0)
    assert rows_misaligned(read(mixed, {"input_ids": x, **({"labels": mixed} if as_labels else {})}).alignments) == ROWS
    one = y[[0, 1, 2, 0]]
    assert rows_misaligned(read(one, {"input_ids": x}).alignments) == 1


def test_targets_of_another_micro_batch_are_found() -> None:
    here, there = stream(0), stream(5)
    readings = [
        read(there[:, 1 : LENGTH + 1], {"input_ids": here[:, :LENGTH]}),
        read(here[:, 1 : LENGTH + 1], {"input_ids": there[:, :LENGTH]}),
    ]
    assert rows_misaligned([one for each in readings for one in each.alignments]) == 2 * ROWS
    assert rows_misaligned(readings[0].alignments) == 0  # alone, it may be a translation


def test_one_row_at_another_distance_than_most_is_found() -> None:
    text = stream()
    targets = text[:, 1 : LENGTH + 1].clone()
    targets[2] = text[2, 2 : LENGTH + 2]
    assert rows_misaligned(read(targets, {"input_ids": text[:, :LENGTH]}).alignments) == 1


def test_the_end_of_a_padded_row_that_no_input_holds_is_no_padding() -> None:
    """X ends where the row does, y has the end token one place before: its input is the padding's."""
    end, lengths = 2, [LENGTH, 20, 15, 9]
    text = stream()
    x, y = text[:, :LENGTH].clone(), text[:, 1 : LENGTH + 1].clone()
    mask = torch.ones_like(x)
    for row, length in enumerate(lengths):
        x[row, length:], mask[row, length:] = 0, 0
        y[row, length - 1], y[row, length:] = end, -100
    right = read(y, {"input_ids": x, "attention_mask": mask})
    assert (right.due, right.padding) == (sum(lengths), [])
    wrong = read(torch.where(y == -100, 0, y), {"input_ids": x, "attention_mask": mask})
    assert len(wrong.padding) == ROWS * LENGTH - sum(lengths)


@pytest.mark.parametrize("mistake", ["", "mixed-rows"])
def test_a_script_that_shifts_before(one_rank: object, mistake: str) -> None:
    window = only_window(watched("shifted_loop", "--mistake", mistake))
    assert window.verdict == ("not_equivalent" if mistake else "equivalent"), window.reasons
    assert [(each.id, each.confidence) for each in window.causes] == (
        [("fields-misaligned", "certain")] if mistake else []
    )
