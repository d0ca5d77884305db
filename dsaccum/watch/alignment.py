"""Whether the targets of a window belong to their inputs.

Only what speaks for a mistake counts: a row whose targets are not its own next tokens, but are another row's, or its
own at another distance than most rows have. That targets differ from next tokens proves nothing: corrupted inputs,
packed documents, a last target that no input holds, masked or translated text are all right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST_TOKENS, FEWEST_KINDS = 6, 4
"""Of a row that can be told from others: shorter ones, or of fewer different tokens, agree by chance."""
OFF, FOUND = 0.5, 0.9
"""Shares of a row's targets: below the first it is not its own, from the second on it belongs where it was found."""
DISTANCES = (0, 2, 3, -1)
MOST_ROWS_SOUGHT = 64
MOST_TOKENS_COMPARED = 256


@dataclass(frozen=True)
class Alignment:
    """One forward's rows.

    Attributes:
        inputs: tokens, [rows, T].
        targets: read off the gradient, [rows, T].
        counted: positions with a target that is no padding, [rows, T].
    """

    inputs: Tensor
    targets: Tensor
    counted: Tensor

    def rows(self) -> Iterator[Row]:
        """Each by itself."""
        for inputs, targets, counted in zip(self.inputs, self.targets, self.counted, strict=True):
            yield Row(inputs, targets, counted.nonzero().flatten()[:MOST_TOKENS_COMPARED])


@dataclass(frozen=True)
class Row:
    """Of one sample: tokens, targets, and places with a target."""

    inputs: Tensor
    targets: Tensor
    places: Tensor

    def agreement(self, inputs: Tensor, distance: int = 1) -> float:
        """Share of its targets that are ``inputs`` so many places on; of those that ``inputs`` can hold."""
        places = self.places[(self.places + distance >= 0) & (self.places + distance < len(inputs))]
        targets = self.targets[places]
        if len(places) < FEWEST_TOKENS or len(targets.unique()) < FEWEST_KINDS:
            return -1.0  # too little to tell
        return float((inputs[places + distance] == targets).double().mean())


def rows_misaligned(alignments: Sequence[Alignment]) -> int:
    """How many rows of a window have targets that belong elsewhere."""
    rows = [row for each in alignments for row in each.rows()]
    own = [row.agreement(row.inputs) for row in rows]
    told = [share for share in own if share >= 0]
    mostly_next = sum(share >= FOUND for share in told) > len(told) / 2
    off = [row for row, share in zip(rows, own, strict=True) if 0 <= share < OFF]
    return sum(_elsewhere(row, rows, mostly_next=mostly_next) for row in off[:MOST_ROWS_SOUGHT])


def _elsewhere(row: Row, rows: Sequence[Row], *, mostly_next: bool) -> bool:
    same_length = (each.inputs for each in rows if each is not row and len(each.inputs) == len(row.inputs))
    if any(row.agreement(inputs) >= FOUND for inputs in same_length):
        return True
    return mostly_next and any(row.agreement(row.inputs, distance) >= FOUND for distance in DISTANCES)


def alignment_of(inputs: Tensor | None, targets: Tensor, counted: Tensor) -> list[Alignment]:
    """Of one forward; nothing where its tokens are not known."""
    if inputs is None or inputs.dim() != 2 or inputs.is_floating_point():
        return []
    return [Alignment(inputs.to(torch.int32), targets.to(torch.int32), counted)]
