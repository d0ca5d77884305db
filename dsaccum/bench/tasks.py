"""What the ranks are asked to do: train some windows against the clock, and measure the memory of one."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from dsaccum.bench.resident import resident_growth
from dsaccum.loss import window_count
from dsaccum.verification.cases.case import Case
from dsaccum.verification.cases.windows import CaseStream, case_stream
from dsaccum.verification.fp32_products import products_as
from dsaccum.verification.measures.memory import MemoryPeak, measure_peak
from dsaccum.verification.ranks.interface import RankContext
from dsaccum.verification.subject.loops import Subject, loop_of
from dsaccum.verification.subject.tasks import subject_of


@dataclass(frozen=True)
class Ran:
    """One rank's windows.

    Attributes:
        seconds: of each, from its data to the next one's.
        losses: of each, as the loop logged them.
        targets: of each, on this rank.
        resident_bytes: by how much the process grew in one more window; None where that cannot be told.
    """

    seconds: list[float]
    losses: list[float | None]
    targets: list[int]
    resident_bytes: int | None


class _Clocked:
    """A stream that notes when each of its windows is asked for, which is when the step before has ended."""

    def __init__(self, stream: CaseStream, device: torch.device) -> None:
        self._stream, self._on_gpu = stream, device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def __len__(self) -> int:
        return len(self._stream)

    def window(self, index: int) -> list[dict[str, Tensor]]:
        """As the stream has it."""
        self.mark()
        return self._stream.window(index)

    def samples_in(self, index: int) -> int:
        """As the stream has it."""
        return self._stream.samples_in(index)

    def mark(self) -> None:
        """Now; on a GPU when it has come so far, without waiting for it."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between the marks."""
        if self._on_gpu:
            torch.cuda.synchronize()
            pairs = zip(self._events[:-1], self._events[1:], strict=True)
            return [first.elapsed_time(second) / 1000 for first, second in pairs]
        return [second - first for first, second in zip(self._times[:-1], self._times[1:], strict=True)]


def train(context: RankContext, case: Case, /) -> Ran:
    """Run the case's windows from its initial weights as a run would, with its dropout and its kind of products."""
    with subject_of(context, case, dropout=True) as subject, products_as(subject.products):
        loop = loop_of(case.loop)
        clocked = _Clocked(stream := case_stream(case, context.ranks.rank), subject.window_engine.device)
        losses = loop(subject, clocked)
        clocked.mark()
        targets = [window_count(subject.window_engine.loss, stream.window(index)) for index in range(len(stream))]
        return Ran(clocked.seconds(), losses, targets, _growth(subject, case, context.ranks.rank))


def measure_memory(context: RankContext, case: Case, /) -> MemoryPeak:
    """The peak of one window of the case, with the optimizer's states made before."""
    with subject_of(context, case, dropout=True) as subject:
        loop, windows = loop_of(case.loop), case_stream(case.with_windows(case.windows[:1]), context.ranks.rank)
        return measure_peak(subject, case, lambda: loop(subject, windows))


def _growth(subject: Subject, case: Case, rank: int) -> int | None:
    if subject.window_engine.device.type == "cuda":  # its allocator is the second witness
        return None
    one = case_stream(case.with_windows(case.windows[:1]), rank)
    return resident_growth(lambda: loop_of(case.loop)(subject, one))
