"""A stream of samples that was entered at another place: by how many samples it is off, if that explains all rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from dsaccum.verification.cases.case import Case, WindowChoice
from dsaccum.verification.comparison.sample_check import row_key
from dsaccum.verification.comparison.truth import ReferenceSide
from dsaccum.verification.subject.capture import WindowCapture


def stream_offset(case: Case, side: ReferenceSide, captures: Sequence[Sequence[WindowCapture]]) -> int | None:
    """How many samples later than is due the windows of a case that goes on were taken; below 0 for earlier.

    Args:
        case: what is verified.
        side: knows what each window holds.
        captures: by window and rank.

    Returns:
        None where the case begins, or no one offset explains every row.
    """
    if case.resumed is None:
        return None
    places = _places(case, side)
    offsets: set[int] | None = None
    for choice, window in zip(case.windows, captures, strict=True):
        given = [capture.micro_batches for capture in window]
        by_step = zip(*given, strict=False)
        for entry, row in enumerate(_rows(by_step)):
            due = choice.index * case.batch.total + entry
            fitting = {place - due for place in places.get(row_key(row), ())}
            offsets = fitting if offsets is None else offsets & fitting
    return min((offset for offset in offsets or () if offset), key=abs, default=None)


def _places(case: Case, side: ReferenceSide) -> dict[bytes, list[int]]:
    """Content of a row -> where in the stream it stands, counted in rows of whole windows."""
    assert case.resumed is not None
    places: dict[bytes, list[int]] = {}
    for index in sorted({choice.index for choice in case.windows} | set(case.resumed.nearby)):
        for entry, row in enumerate(_rows(side.micro_batches(WindowChoice(index, probe=False)))):
            places.setdefault(row_key(row), []).append(index * case.batch.total + entry)
    return places


def _rows(
    micro_batches: Iterator[Sequence[Mapping[str, Tensor]]] | Sequence[Sequence[Mapping[str, Tensor]]],
) -> Iterator[Tensor]:
    """In the order of the effective batch: by micro-step, rank and row."""
    for step in micro_batches:
        for batch in step:
            yield from batch["input_ids"]
