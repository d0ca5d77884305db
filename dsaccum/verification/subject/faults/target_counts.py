"""Losses divided by another count than the window's target tokens.

A micro-batch with n targets is due n / T, with T the targets of the window on all ranks. Each mistake gives it another
weight; the loss is multiplied by the ratio of that to what the loop itself gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsaccum.data import NOT_A_TARGET
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.subject.faults.fault import Fault, Unfit, several_micro_batches, several_ranks
from dsaccum.verification.subject.faults.streams import ChangedWindows, MicroBatch
from dsaccum.verification.subject.faults.weights import losses_multiplied
from dsaccum.verification.subject.loops import DSACCUM, HF_LABELS, OUTSIDE_LOSS

if TYPE_CHECKING:
    from dsaccum.verification.cases.case import Case
    from dsaccum.verification.subject.loops import Subject, Windows


@dataclass(frozen=True)
class Counts:
    """Of one micro-batch: targets after the shift, labels that count if nothing is shifted, all positions; rows that
    hold a sample, and all rows.
    """

    targets: int
    labels: int
    positions: int
    samples: int
    rows: int

    @classmethod
    def of(cls, micro_batch: MicroBatch) -> Counts:
        """Count them."""
        labels = micro_batch["labels"]
        counted = labels != NOT_A_TARGET
        samples = int(counted.any(dim=1).sum())
        return cls(int(counted[:, 1:].sum()), int(counted.sum()), labels.numel(), samples, len(labels))


Window = list[list[Counts]]
"""[W][N]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Miscounted(Fault):
    """A micro-batch weighs what a wrong count gives it.

    Attributes:
        weight: of (window, rank, index in the window): what the mistake gives, where n / T is due.
        factors: of the window that the loop was given last; what ``feed`` learns from data and ``planted`` applies.
    """

    weight: Callable[[Window, int, int], float]
    factors: list[float] = field(default_factory=list)

    def feed(self, windows: Windows, case: Case, rank: int) -> Windows:  # noqa: D102
        everyone = [case_stream(case, other) for other in range(case.batch.world_size)]

        def remembered(index: int, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
            window = [[Counts.of(micro_batch) for micro_batch in stream.window(index)] for stream in everyone]
            self.factors[:] = [self._factor(window, rank, step, case.loop) for step in range(len(micro_batches))]
            return micro_batches

        return ChangedWindows(windows, remembered)

    @contextmanager
    def planted(self, subject: Subject, case: Case) -> Iterator[None]:  # noqa: D102
        try:
            with losses_multiplied(subject, lambda micro_step: self.factors[micro_step - 1]):
                yield
        finally:
            self.factors.clear()

    def _factor(self, window: Window, rank: int, step: int, loop: str) -> float:
        if window[rank][step].targets == 0:
            return 1.0  # there is no gradient to weigh
        given = _due(window, rank, step) if loop == DSACCUM else _mean_of_means(window, rank, step)
        return self.weight(window, rank, step) / given


def _due(window: Window, rank: int, step: int) -> float:
    """What is due: n / T."""
    return window[rank][step].targets / sum(counts.targets for counts in _all(window))


def _mean_of_means(window: Window, rank: int, step: int) -> float:
    """The mean of every micro-batch's own mean: 1 / (N W)."""
    return 1 / len(_all(window))


def _rank_mean_of_means(window: Window, rank: int, step: int) -> float:
    """Right within each rank r of T_r targets, then the mean over ranks: n / (T_r W)."""
    own = window[rank]
    return own[step].targets / sum(counts.targets for counts in own) / len(window)


def _before_shift(window: Window, rank: int, step: int) -> float:
    """Over labels that are not -100: the first one of a row predicts nothing, and is counted."""
    return window[rank][step].targets / sum(counts.labels for counts in _all(window))


def _with_padding(window: Window, rank: int, step: int) -> float:
    """Over all positions."""
    return window[rank][step].targets / sum(counts.positions for counts in _all(window))


def _full_divisor(window: Window, rank: int, step: int) -> float:
    """Over what a full window would hold: the share of its rows that hold a sample is lost."""
    held = sum(counts.samples for counts in _all(window)) / sum(counts.rows for counts in _all(window))
    return _due(window, rank, step) * held


def _all(window: Window) -> list[Counts]:
    return [counts for of_rank in window for counts in of_rank]


_PADDED = "--experiment launch/experiments/stdlib-functions.yaml, or data.packing: padded"


def _known_weights(case: Case) -> Unfit | None:
    """A loop of which it is known what it weighs by, and a loss that is counted in target tokens."""
    if case.loop not in (DSACCUM, HF_LABELS, OUTSIDE_LOSS):
        return Unfit("how a loop of your own weighs its micro-batches is not known", "--loop dsaccum")
    return Unfit("loss.factory has a count of its own") if case.experiment.loss.factory else None


def _own_loop(case: Case) -> Unfit | None:
    return (
        None if case.loop == DSACCUM else Unfit(f"the loop {case.loop} is a mean of means by itself", "--loop dsaccum")
    )


def _ragged(case: Case) -> Unfit | None:
    return None if case.samples.padded else Unfit("packed samples all have the same number of targets", _PADDED)


def _has_a_short_window(case: Case) -> Unfit | None:
    held = case.order.num_samples % case.batch.total
    position = case.order.num_samples // case.batch.total
    short = case.order.last_window == "short" and held
    if short and any(choice.index % (position + 1) == position for choice in case.windows):
        return None
    return Unfit("no window that is verified is short", None if short else "data.last_window: short")


def _has_padding(case: Case) -> Unfit | None:
    return None if case.samples.padded else Unfit("packed samples have no padding", _PADDED)


def _first_label_counts(case: Case) -> Unfit | None:
    without_prompt = (case.samples.prompt_lengths == 0) & (case.samples.lengths > 0)
    return None if without_prompt.any() else Unfit("every row starts with a prompt, whose labels count for nobody")


COUNT_FAULTS: tuple[Fault, ...] = (
    Miscounted(
        id="mean-of-means",
        summary="each micro-batch's loss is its own mean, so that few targets weigh as much as many",
        needs=(_known_weights, _own_loop, _ragged, several_micro_batches),
        weight=_mean_of_means,
    ),
    Miscounted(
        id="rank-mean-of-means",
        summary="each rank divides by its own target tokens, and ranks are averaged as equals",
        needs=(_known_weights, several_ranks, _ragged),
        weight=_rank_mean_of_means,
    ),
    Miscounted(
        id="targets-counted-before-shift",
        summary="labels are counted before the shift, though each row's first one predicts nothing",
        needs=(_known_weights, _first_label_counts),
        weight=_before_shift,
    ),
    Miscounted(
        id="padding-counted",
        summary="the loss is divided by all positions, padding included",
        needs=(_known_weights, _has_padding),
        weight=_with_padding,
    ),
    Miscounted(
        id="short-window-full-divisor",
        summary="an epoch's short last window is divided by what a full one holds, so that it counts for less",
        needs=(_known_weights, _own_loop, _has_a_short_window),
        weight=_full_divisor,
    ),
)
