"""Which windows are verified, the samples that they need, cut shorter where the case is, and what each rank is fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from dsaccum.data import FILLER, Samples, WindowOrder, WindowStream
from dsaccum.reference_samples import RawSamples
from dsaccum.training.checkpoints.manifest import StreamOrigin
from dsaccum.verification.cases.case import Case, OrderRule, WindowChoice

MOST_WARM_UP_STEPS = 8
"""A schedule that starts at rate 0 is waited for so long."""
_UPDATES_WANTED = 2
_SHORTEST = 16
_PROBE = 1  # keeps the draw apart from others with the same seed


def steps_to_verify(wanted: int, rates: Sequence[float]) -> tuple[int, list[str]]:
    """How many steps it takes until two updates have changed anything, and a warning where eight do not suffice.

    Args:
        wanted: steps that were asked for; there are never fewer.
        rates: learning rates of the first updates, ``max(wanted, MOST_WARM_UP_STEPS)`` of them; empty where the
            optimizer has none.
    """
    if not rates:
        return max(wanted, _UPDATES_WANTED), []
    counting = [step for step, rate in enumerate(rates, start=1) if rate != 0]
    if len(counting) >= _UPDATES_WANTED:
        return max(wanted, counting[_UPDATES_WANTED - 1]), []
    steps = len(rates)
    return steps, [f"the learning rate is 0 at {steps - len(counting)} of the next {steps} updates"]


def updates_that_change(rates: Sequence[float]) -> bool:
    """Whether so many of these updates change something as are wanted; true where the optimizer has no rates."""
    return not rates or sum(rate != 0 for rate in rates) >= _UPDATES_WANTED


def plan_windows(order: WindowOrder, steps: int) -> tuple[WindowChoice, ...]:
    """The window of each step: probes at odd steps, which tell weights sharply, and text as it is at even ones.

    Steps take the run's first windows in turn. Where an epoch's last window is short, the second step takes that one.
    """
    indices = list(range(steps))
    if order.last_window == "short" and order.num_samples % order.effective_batch and steps > 1:
        last = int(order.windows_per_epoch) - 1
        if last >= steps:
            indices[1] = last
    return tuple(WindowChoice(index, probe=position % 2 == 0) for position, index in enumerate(indices))


def needed_samples(rule: OrderRule, effective_batch: int, windows: Sequence[WindowChoice]) -> np.ndarray:
    """Samples of the windows, of one window more, and of a first one that is twice as long, sorted: [needed], int64."""
    order = WindowOrder(rule.num_samples, effective_batch, rule.last_window, rule.seed)
    doubled = WindowOrder(rule.num_samples, 2 * effective_batch, "continue", rule.seed)
    indices = {choice.index for choice in windows} | {len(windows)}
    ids = np.concatenate([doubled.sample_ids(0), *(order.sample_ids(index) for index in indices)])
    return np.unique(ids[ids != FILLER])


def keep_samples(samples: Samples, needed: np.ndarray) -> Samples:
    """As many samples as before, of which only the needed ones have tokens; the others are empty."""
    kept = np.zeros(len(samples), bool)
    kept[needed] = True
    lengths = np.where(kept, samples.lengths, 0)
    pieces = [samples.tokens[samples.starts[sample] :][: lengths[sample]] for sample in needed]
    return replace(
        samples,
        tokens=np.concatenate(pieces),
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        prompt_lengths=np.where(kept, samples.prompt_lengths, 0),
    )


def probe_samples(samples: Samples, ids: np.ndarray, seed: int) -> Samples:
    """The same samples with random tokens: lengths, prompts and padding stay.

    Args:
        samples: the text.
        ids: the tokens to draw from, all equally likely.
        seed: of the draw.
    """
    drawn = np.random.default_rng((seed, _PROBE)).integers(len(ids), size=len(samples.tokens))
    return replace(samples, tokens=ids[drawn].astype(samples.tokens.dtype))


def ids_in_use(samples: Samples, vocabulary_size: int) -> np.ndarray:
    """Ids that occur in the text, sorted."""
    occurs = np.zeros(vocabulary_size, bool)
    occurs[samples.tokens] = True
    return np.flatnonzero(occurs)


def shorter_lengths(samples: Samples) -> list[int]:
    """Sequence lengths to which the samples can be cut, longest first; ragged samples stay ragged at each of them."""
    ragged, lengths = _is_ragged(samples), []
    length = samples.sequence_length
    while length > _SHORTEST:
        length = max(_SHORTEST, length // 2 // 8 * 8)
        if not ragged or _is_ragged(cut_samples(samples, length)):
            lengths.append(length)
    return lengths


def cut_samples(samples: Samples, length: int) -> Samples:
    """As many samples, none longer than ``length``, in proportion; what stays is around where targets begin."""
    if not samples.padded:
        return replace(samples, lengths=np.full_like(samples.lengths, length), sequence_length=length)
    ratio = length / samples.sequence_length
    lengths = np.maximum(np.rint(samples.lengths * ratio), 2).astype(np.int64)
    # A prompt keeps a token, and so does what follows it: without either, a short row would lose its only target.
    prompts = np.maximum(np.rint(samples.prompt_lengths * ratio), np.minimum(samples.prompt_lengths, 1))
    prompts = np.minimum(prompts, lengths - 1).astype(np.int64)
    lengths = np.minimum(lengths, prompts + samples.lengths - samples.prompt_lengths)
    starts = samples.starts + samples.prompt_lengths - prompts
    return replace(samples, starts=starts, lengths=lengths, prompt_lengths=prompts, sequence_length=length)


def _is_ragged(samples: Samples) -> bool:
    fields = (samples.tokens, samples.starts, samples.lengths, samples.prompt_lengths)
    return RawSamples(*fields, padded=samples.padded, sequence_length=samples.sequence_length).ragged


class CaseStream:
    """One rank's micro-batches, step by step; steps count from 0, those before a checkpoint included.

    Args:
        case: what is verified.
        rank: data-parallel rank, from 0.
    """

    def __init__(self, case: Case, rank: int) -> None:
        self._windows, self._first = case.windows, case.counters.step
        rule, effective_batch = case.order, case.batch.total
        # A split that is larger than the run's own may not fit into an epoch, and nothing would be left to drop.
        fits = rule.num_samples >= effective_batch or rule.last_window != "drop"
        last_window = rule.last_window if fits else "continue"
        origin = case.resumed.checkpoint.manifest.origin if case.resumed is not None else StreamOrigin()
        order = WindowOrder(
            rule.num_samples,
            effective_batch,
            last_window,
            rule.seed,
            case.source,
            first_window=origin.window,
            position=origin.position,
        )
        self._text, self._probe = (
            WindowStream(samples, order, case.batch, rank, case.vocabulary.pad_token)
            for samples in (case.samples, case.probe_samples)
        )

    def __len__(self) -> int:
        return len(self._windows)

    def window(self, step: int) -> list[dict[str, Tensor]]:
        """The N micro-batches of a step's window on this rank.

        Raises:
            ValueError: the case does not hold a sample of it.
        """
        choice = self._choice(step)
        ids = self.sample_ids(step)
        if not self._text.samples.lengths[ids[ids != FILLER]].all():
            raise ValueError(f"window {choice.index} is none of this case: its samples were left out")
        return (self._probe if choice.probe else self._text).window(choice.index)

    def sample_ids(self, step: int) -> np.ndarray:
        """Samples of a step's window on this rank, [N, B]; ``FILLER`` for rows without a sample."""
        return self._text.sample_ids(self._choice(step).index)

    def samples_in(self, step: int) -> int:
        """How many of this rank's rows in a step's window hold a sample."""
        return self._text.samples_in(self._choice(step).index)

    def _choice(self, step: int) -> WindowChoice:
        return self._windows[step - self._first]


def case_stream(case: Case, rank: int) -> CaseStream:
    """What a rank is fed. Made on the rank itself: the order of samples cannot be sent there."""
    return CaseStream(case, rank)
