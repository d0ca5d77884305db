"""``"train_micro_batch_size_per_gpu": "auto"``: where B starts, and how it is halved when memory runs out; E stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from dsaccum.allocator import is_out_of_memory
from dsaccum.batch import EffectiveBatch
from dsaccum.engine.process import Ranks
from dsaccum.training.outcome import RunFailed

if TYPE_CHECKING:
    from dsaccum.data import WindowStream
    from dsaccum.engine.window_engine import WindowEngine
    from dsaccum.training.inputs import Inputs
    from dsaccum.training.journal import Journal
    from dsaccum.training.watchdog import Watchdog

Note = Callable[[str], None]
Known = tuple[int, str]
_SHOWN = 200


class Sizing(Protocol):
    """What one rank knows about memory; the floors above answer it. ``Known`` is a B, and in a few words why."""

    def remembered(self, inputs: Inputs) -> Known | None:
        """The largest B worth a try, where more did not fit before."""

    def free_bytes(self, ranks: Ranks) -> int:
        """That this rank may plan with."""

    def planned(self, inputs: Inputs, memory_bytes: int, moved: Callable[[], None]) -> Known:
        """The largest B that should fit; asked on rank 0."""

    def remember(self, inputs: Inputs, micro_batch: int) -> None:
        """More than this did not fit; never fails."""


class TryTheLargest:
    """Knows nothing: all of a rank's samples in one micro-batch, until memory runs out."""

    def remembered(self, inputs: Inputs) -> Known | None:
        """Nothing."""
        return None

    def free_bytes(self, ranks: Ranks) -> int:
        """Not looked at."""
        return 0

    def planned(self, inputs: Inputs, memory_bytes: int, moved: Callable[[], None]) -> Known:
        """The largest there is."""
        return samples_of_a_rank(inputs.deepspeed.batch), "all samples of a rank"

    def remember(self, inputs: Inputs, micro_batch: int) -> None:
        """The next start begins anew."""


def choose_micro_batch(inputs: Inputs, ranks: Ranks, sizing: Sizing, note: Note, moved: Callable[[], None]) -> Inputs:
    """Fill in N and B where the JSON leaves them open. A collective: rank 0 decides with what all ranks know.

    A run that is continued goes on as it was, unless that did not fit; any other one starts with what was found to fit
    before, or else with what a plan finds to fit.
    """
    if not inputs.deepspeed.automatic:
        return inputs
    everyone: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(everyone, (sizing.remembered(inputs), sizing.free_bytes(ranks)))
    answer: list[Known | None] = [None]
    if ranks.is_first:
        limits = [known for known, _ in everyone if known is not None]
        if before := _continued(inputs, ranks):
            limits.append(before)
        answer = [min(limits) if limits else sizing.planned(inputs, min(free for _, free in everyone), moved)]
    dist.broadcast_object_list(answer)
    assert answer[0] is not None
    at_most, why = answer[0]
    batch = split_with(inputs.deepspeed.batch, at_most)
    note(f"micro-batch     auto: B = {batch.micro_batch}, N = {batch.accumulation_steps} ({why})")
    return replace(inputs, deepspeed=inputs.deepspeed.split_as(batch))


def split_with(batch: EffectiveBatch, at_most: int) -> EffectiveBatch:
    """The same E with the largest B that divides E / W and is no larger than this (at least 1)."""
    samples = samples_of_a_rank(batch)
    micro_batch = next(rows for rows in range(min(at_most, samples), 0, -1) if samples % rows == 0)
    return EffectiveBatch(batch.world_size, samples // micro_batch, micro_batch)


def half_of(batch: EffectiveBatch) -> EffectiveBatch | None:
    """The same E with half of B, or with the next smaller B that divides E / W; None where B is 1."""
    return split_with(batch, batch.micro_batch // 2) if batch.micro_batch > 1 else None


class AutomaticMicroBatch:
    """Halves B on all ranks together when memory runs out on one of them.

    Args:
        inputs: of the run.
        ranks: this process's place.
        engine: of the run, made with ``recover``.
        stream: of the run.
        sizing: told what did not fit.
        journal: of the run.
    """

    def __init__(
        self,
        inputs: Inputs,
        ranks: Ranks,
        engine: WindowEngine,
        stream: WindowStream,
        sizing: Sizing,
        journal: Journal,
    ) -> None:
        self._inputs, self._ranks, self._engine, self._stream = inputs, ranks, engine, stream
        self._sizing, self._journal = sizing, journal

    def after_void_window(self, step: int, out_of_memory: str | None) -> WindowStream | None:
        """Halve B; the engine has forgotten the window then. A collective, after one whose step was discarded.

        Args:
            step: of the window.
            out_of_memory: this rank's word.

        Returns:
            The windows in smaller micro-batches; None where no rank lacked memory: it was discarded for another reason.

        Raises:
            RunFailed: B is 1.
        """
        everyone: list[str | None] = [None] * self._ranks.world_size
        dist.all_gather_object(everyone, out_of_memory)
        where = [(rank, what) for rank, what in enumerate(everyone) if what is not None]
        if not where:
            return None
        rank, what = where[0]
        before, smaller = self._engine.batch, half_of(self._engine.batch)
        if smaller is None:
            raise RunFailed(_hopeless(f"rank {rank} ran out of memory in step {step}", what))
        if self._ranks.is_first:
            self._sizing.remember(self._inputs, smaller.micro_batch)
        line = (
            f"micro-batch     B = {smaller.micro_batch}, N = {smaller.accumulation_steps} from step {step} on, before "
            f"{before.micro_batch} and {before.accumulation_steps}: rank {rank} ran out of memory ({what[:_SHOWN]})"
        )
        self._engine.run_again_as(smaller)
        self._journal.split_anew(smaller, step, line)
        return self._stream.split_as(smaller)

    @contextmanager
    def remembered(self, watchdog: Watchdog) -> Iterator[None]:
        """Where a window cannot be run again, the next start has the smaller B.

        Raises:
            RunFailed: memory ran out inside.
        """
        try:
            yield
        except Exception as error:
            where = watchdog.position
            if not is_out_of_memory(error) or not where.holds_micro_batch:
                raise
            smaller, what = half_of(self._engine.batch), " ".join(str(error).split())[:_SHOWN]
            told = f"rank {self._ranks.rank} ran out of memory in {where}"
            if smaller is None:
                raise RunFailed(_hopeless(told, what), own=True) from error
            self._sizing.remember(self._inputs, smaller.micro_batch)
            there = "at ZeRO 3" if self._inputs.deepspeed.zero_stage == 3 else "from there"
            raise RunFailed(
                f"{told} ({what}); the run cannot go on {there}, but B = {smaller.micro_batch} is "
                "remembered: the same command goes on with it",
                own=True,
            ) from error


def _hopeless(told: str, what: str) -> str:
    return (
        f"{told} with micro-batches of 1 sample ({what[:_SHOWN]}); no smaller one exists; fix: `dsaccum plan` shows "
        "what else would fit, e.g. model.activation_checkpointing: true"
    )


def _continued(inputs: Inputs, ranks: Ranks) -> Known | None:
    """Of the run that goes on, where it ran on as many ranks."""
    before = inputs.start.record.get("effective_batch")
    if not isinstance(before, dict) or before.get("world_size") != ranks.world_size:
        return None
    rows = before.get("micro_batch")
    return (rows, "as before") if isinstance(rows, int) and rows > 0 else None


def samples_of_a_rank(batch: EffectiveBatch) -> int:
    """E / W = N x B."""
    return batch.accumulation_steps * batch.micro_batch
