"""Rows that come to the wrong place: the wrong rank, the wrong window, the wrong labels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dsaccum.data import NOT_A_TARGET
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.subject.faults.fault import Fault, Unfit, several_ranks, several_windows
from dsaccum.verification.subject.faults.streams import ChangedWindows, MicroBatch

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Windows


class RanksShareData(Fault):
    """Every rank reads what belongs to rank 0."""

    def feed(self, windows: Windows, case: Case, rank: int) -> Windows:  # noqa: D102
        first = case_stream(case, 0)
        return ChangedWindows(windows, lambda index, _: first.window(index))


class SamplesMisplaced(Fault):
    """On rank 0 a window's last row is replaced by the first one of the next window, which then comes twice."""

    def feed(self, windows: Windows, case: Case, rank: int) -> Windows:  # noqa: D102
        if rank != 0:
            return windows

        def misplaced(index: int, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
            first = case.counters.step
            later = windows.window(first + (index - first + 1) % len(windows))[0]
            last = _with_last_row(micro_batches[-1], later, case.vocabulary.pad_token)
            return [*micro_batches[:-1], last]

        return ChangedWindows(windows, misplaced)


class FieldsMisaligned(Fault):
    """Labels are sliced one row later than the other fields."""

    def feed(self, windows: Windows, case: Case, rank: int) -> Windows:  # noqa: D102
        def misaligned(index: int, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
            rows = [row for micro_batch in micro_batches for row in micro_batch["labels"]]
            rolled = iter([*rows[1:], rows[0]])
            return [{**fields, "labels": _labels_like(fields["labels"], rolled)} for fields in micro_batches]

        return ChangedWindows(windows, misaligned)


def _with_last_row(micro_batch: MicroBatch, other: MicroBatch, pad_token: int) -> MicroBatch:
    """The micro-batch with the first row of ``other`` as its last, both padded to the wider of the two."""
    width = max(micro_batch["labels"].size(1), other["labels"].size(1))
    padding = {"labels": NOT_A_TARGET, "input_ids": pad_token}
    return {
        name: torch.cat(
            [_resized(rows[:-1], width, padding.get(name, 0)), _resized(other[name][:1], width, padding.get(name, 0))]
        )
        for name, rows in micro_batch.items()
    }


def _labels_like(labels: Tensor, rows: Iterator[Tensor]) -> Tensor:
    """As many of the rows as there are labels, of the same width."""
    return torch.stack([_resized(next(rows), labels.size(1), NOT_A_TARGET) for _ in range(len(labels))])


def _resized(rows: Tensor, width: int, padding: int) -> Tensor:
    """Rows cut or padded on the right to ``width``."""
    return F.pad(rows, (0, width - rows.size(-1)), value=padding)


def _several_rows(case: Case) -> Unfit | None:
    one = case.batch.accumulation_steps * case.batch.micro_batch == 1
    return Unfit("a rank has one row in a window (N = B = 1)", "--micro-batch 2") if one else None


DATA_FAULTS: tuple[Fault, ...] = (
    RanksShareData(
        id="ranks-share-data",
        summary="every rank reads the same samples: the sampler was not told which rank it is on",
        needs=(several_ranks,),
    ),
    SamplesMisplaced(
        id="samples-misplaced",
        summary="a sample of the next window stands in place of one of this window",
        needs=(several_windows,),
    ),
    FieldsMisaligned(
        id="fields-misaligned",
        summary="labels are sliced by another range than inputs and mask, one row later",
        needs=(_several_rows,),
    ),
)
