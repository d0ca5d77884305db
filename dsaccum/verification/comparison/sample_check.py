"""Were the ranks fed the samples that the rule says? Every field of every micro-batch is compared, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsaccum.data.samples import NOT_A_TARGET
from dsaccum.verification.subject.capture import WindowCapture

_BYTES = 8
"""Of a token."""
Kind = Literal[
    "another rank's", "another window's", "another place's", "unknown", "misaligned", "forward", "cut", "missing"
]


@dataclass(frozen=True)
class SampleFault:
    """One micro-batch that is not the one that is due.

    Attributes:
        rank: from 0.
        micro_step: from 1.
        kind: where the rows that came instead belong; ``misaligned``: inputs are right and another field isn't;
            ``forward``: the model was given other tokens than the loop; ``cut``: rows end before their last target;
            ``missing``: a row didn't reach the model, and no other one in its place.
        field: the first field that differs.
        handed_on: the loop was given the right one, and handed the model another.
    """

    rank: int
    micro_step: int
    kind: Kind
    field: str
    handed_on: bool = False


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
        ours: the loop makes one forward of each micro-batch as it is. A user's own may split, trim, pad, pack or repeat
            it: there every row has to reach the model up to its last target, in whatever forward of its micro-step.
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
            elif not ours and (kind := _handed_on(capture, index, wanted, rank, places, len(due))) is not None:
                faults.append(SampleFault(rank, index + 1, kind, "input_ids", handed_on=True))
    return faults


def _handed_on(
    capture: WindowCapture,
    index: int,
    wanted: Mapping[str, Tensor],
    rank: int,
    places: dict[bytes, set[str]],
    micro_steps: int,
) -> Kind | None:
    """What a loop handed to the model in place of this micro-batch; None where that is in it, or can't be told."""
    tokens = [each for each in capture.inputs if each.dim() in (1, 2) and not each.is_floating_point()]
    if len(tokens) != len(capture.inputs) or set(capture.inputs_at) != set(range(1, micro_steps + 1)):
        return None
    at = zip(capture.inputs, capture.inputs_at, strict=True)
    given = [row.long() for each, step in at if step == index + 1 for row in each.reshape(-1, each.shape[-1])]
    whole = [row.numpy().tobytes() for row in given]
    needed = [_up_to_the_last_target(*rows) for rows in zip(wanted["input_ids"], wanted["labels"], strict=True)]
    if all(any(_holds(row, part.numpy().tobytes()) for row in whole) for part in needed):
        return None
    due = [row.long() for row in wanted["input_ids"]]
    strays = [row for row in given if row_key(row) not in {row_key(each) for each in due}]
    if not strays:
        return "missing"
    if all(any(_holds(each.numpy().tobytes(), row.numpy().tobytes()) for each in due) for row in strays):
        return "cut"
    if not all(places.get(row_key(row)) for row in strays):
        return "forward"
    return _kind({"input_ids": torch.stack(strays)}, wanted, "input_ids", rank, places)


def _up_to_the_last_target(tokens: Tensor, labels: Tensor) -> Tensor:
    """The tokens that a row's targets are predicted from; the last target itself is predicted, and not needed."""
    targets = (labels[1:] != NOT_A_TARGET).nonzero()
    return tokens[: int(targets[-1]) + 1].long() if len(targets) else tokens[:0].long()


def _holds(row: bytes, part: bytes) -> bool:
    """Whether these tokens stand in a row, one after another."""
    at = row.find(part)
    while at > 0 and at % _BYTES:
        at = row.find(part, at + 1)
    return at >= 0


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
    due = {row_key(row) for row in wanted["input_ids"]}
    strays = [places.get(row_key(row), set()) for row in given.get("input_ids", []) if row_key(row) not in due]
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
                places.setdefault(row_key(row), set()).add(f"rank {rank}")
    for window in elsewhere:
        for step in window:
            for batch in step:
                for row in batch["input_ids"]:
                    places.setdefault(row_key(row), set()).add("another window")
    return places


def row_key(row: Tensor) -> bytes:
    """Its tokens without the filling at the right, which depends on the neighbours."""
    used = (row != row[-1]).nonzero()
    return row[: int(used[-1]) + 2].numpy().tobytes() if len(used) else row[:1].numpy().tobytes()
