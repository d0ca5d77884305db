"""Were the ranks fed the samples that the rule says? Every field of every micro-batch is compared, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsaccum.verification.subject.capture import WindowCapture

Kind = Literal["another rank's", "another window's", "another place's", "unknown", "misaligned", "forward"]


@dataclass(frozen=True)
class SampleFault:
    """One micro-batch that is not the one that is due.

    Attributes:
        rank: from 0.
        micro_step: from 1.
        kind: where the rows that came instead belong; ``misaligned``: inputs are right and another field isn't;
            ``forward``: the model was given other tokens than the loop.
        field: the first field that differs.
    """

    rank: int
    micro_step: int
    kind: Kind
    field: str


def check_samples(
    captures: Sequence[WindowCapture],
    due: Sequence[Sequence[Mapping[str, Tensor]]],
    elsewhere: Sequence[Sequence[Sequence[Mapping[str, Tensor]]]],
    *,
    ours: bool = True,
) -> list[SampleFault]:
    """Compare what each rank was fed in one window with what is due.

    Args:
        captures: of the window, by rank.
        due: micro-batch [k][r].
        elsewhere: the same of the case's other windows, to tell where stray rows belong.
        ours: the loop makes one forward of each micro-batch as it is. A user's own may split, trim or repeat it, and
            what that does shows in the gradient.
    """
    places = _places(due, elsewhere)
    faults = []
    for rank, capture in enumerate(captures):
        for index, step in enumerate(due):
            wanted = step[rank]
            if index >= len(capture.micro_batches):
                faults.append(SampleFault(rank, index + 1, "unknown", "input_ids"))
                continue
            given = capture.micro_batches[index]
            if (field := _first_difference(given, wanted)) is not None:
                faults.append(SampleFault(rank, index + 1, _kind(given, wanted, field, rank, places), field))
            elif ours and index < len(capture.inputs) and not torch.equal(capture.inputs[index], wanted["input_ids"]):
                faults.append(SampleFault(rank, index + 1, "forward", "input_ids"))
    return faults


def _first_difference(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    for name in wanted:
        if name not in given or not torch.equal(given[name], wanted[name]):
            return name
    return None


def _kind(
    given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], field: str, rank: int, places: dict[bytes, set[str]]
) -> Kind:
    if field != "input_ids":
        return "misaligned"
    due = {_key(row) for row in wanted["input_ids"]}
    strays = [places.get(_key(row), set()) for row in given.get("input_ids", []) if _key(row) not in due]
    if strays and all(
        any(place.startswith("rank ") and place != f"rank {rank}" for place in found) for found in strays
    ):
        return "another rank's"
    if strays and all("another window" in found for found in strays if found) and any(strays):
        return "another window's"
    return "another place's" if any(strays) or not strays else "unknown"


def _places(
    due: Sequence[Sequence[Mapping[str, Tensor]]], elsewhere: Sequence[Sequence[Sequence[Mapping[str, Tensor]]]]
) -> dict[bytes, set[str]]:
    """Content of a row -> the ranks of this window that it is due to, and whether another window holds it."""
    places: dict[bytes, set[str]] = {}
    for step in due:
        for rank, batch in enumerate(step):
            for row in batch["input_ids"]:
                places.setdefault(_key(row), set()).add(f"rank {rank}")
    for window in elsewhere:
        for step in window:
            for batch in step:
                for row in batch["input_ids"]:
                    places.setdefault(_key(row), set()).add("another window")
    return places


def _key(row: Tensor) -> bytes:
    """Its tokens without the filling at the right, which depends on the neighbours."""
    used = (row != row[-1]).nonzero()
    return row[: int(used[-1]) + 2].numpy().tobytes() if len(used) else row[:1].numpy().tobytes()
