"""A bench from arguments to a record: prove each split on a small copy, measure its memory, then time them in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from dsaccum.allocator import is_out_of_memory
from dsaccum.batch import EffectiveBatch
from dsaccum.bench import tasks
from dsaccum.bench.arguments import WARM_UP_WINDOWS, BenchArguments
from dsaccum.bench.candidates import candidates, in_turn
from dsaccum.bench.decision import advice, judged, overall
from dsaccum.bench.record import BenchMemory, BenchRecord, BenchTime, BenchUpdate, CandidateRecord, WorkloadRecord
from dsaccum.config.errors import ConfigError
from dsaccum.config.loading import overrides_named
from dsaccum.training.opening import installed_versions
from dsaccum.verification.cases.arguments import VerifyArguments
from dsaccum.verification.cases.case import Case, WindowChoice
from dsaccum.verification.cases.inputs import PreparedCase, Wanted, likely_ranks, prepare_case, read_sources
from dsaccum.verification.measures.memory import MemoryPeak, with_equal_rows
from dsaccum.verification.progress import Progress
from dsaccum.verification.ranks.failed import RankFailed
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.describe import describe_step
from dsaccum.verification.records.hardware import hardware
from dsaccum.verification.records.parts import MemoryByCategory, UpdateRecord
from dsaccum.verification.records.record import verdict_of
from dsaccum.verification.verify import Extent, examine, with_fault

STEPS = 2
"""Optimizer steps that each split's update is verified over, on the copy that ``dsaccum verify`` would take; more where
the schedule starts at rate 0."""
EXTENT = Extent(memory="never", trajectory=False)
_NO_BIG_BATCH = "the big batch, which it is compared with, does not fit into memory here"


@dataclass(frozen=True)
class Bench:
    """What is run.

    Attributes:
        splits: the ways to split the batch, fewest micro-steps first.
        configured: the JSON's own N.
        whole: the run as it is: the user's model, rows and buckets.
        copy: what is verified: the same, or a shrunk copy.
        rounds: how often each split is timed.
    """

    splits: list[EffectiveBatch]
    configured: int
    whole: PreparedCase
    copy: PreparedCase
    rounds: int


def prepare(arguments: BenchArguments) -> Bench:
    """Read everything; nothing is run.

    Raises:
        ConfigError: whatever the user can mend.
    """
    with overrides_named(arguments.overrides):
        windows = WARM_UP_WINDOWS + arguments.windows
        stepping, sources = read_sources(_as_verification(arguments))
        batch = stepping.settings.batch
        splits = candidates(batch, arguments.accumulation_steps)
        if len(splits) < 2:
            problem = f"there is one way to split {batch.total} samples on {batch.world_size} ranks: nothing to compare"
            raise ConfigError(
                problem, source=str(arguments.deepspeed), fix="a larger train_batch_size, or fewer --ranks"
            )
        whole = prepare_case(replace(stepping, steps=windows), sources, Wanted(full_size=True))
        text = tuple(WindowChoice(index, probe=False) for index in range(windows))
        case = replace(whole.case.with_windows(text), config=stepping.settings.config)
        return Bench(
            splits,
            batch.accumulation_steps,
            replace(whole, case=case, substitutions=[*stepping.rescaled, *stepping.unavailable]),
            with_fault(prepare_case(stepping, sources, Wanted()), None),
            arguments.rounds,
        )


def bench(arguments: BenchArguments, progress: Progress, pools: RankPools | None = None) -> BenchRecord:
    """Carry out one bench.

    Args:
        arguments: what was asked for.
        progress: told what happens.
        pools: started ranks to use; None for ranks that start and end here.

    Raises:
        ConfigError: the input is wrong.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        own = pools if pools is not None else stack.enter_context(RankPools())
        own.get(arguments.ranks or likely_ranks())
        progress.stage("reading config, data and model")
        prepared = prepare(arguments)
        measured = _Trial(prepared, own, progress).run()
    records = judged([_candidate(split, measured[split]) for split in prepared.splits])
    word, reason = overall(records)
    case = prepared.whole.case
    return BenchRecord(
        label=arguments.label,
        word=word,
        reason=reason,
        advice=advice(records, case.config, case.experiment.model.activation_checkpointing),
        world_size=case.batch.world_size,
        total=case.batch.total,
        configured_accumulation_steps=prepared.configured,
        candidates=records,
        workload=_workload(prepared),
        substitutions=_substitutions(prepared),
        warnings=prepared.copy.warnings,
        deepspeed_config=case.config,
        experiment=case.experiment.model_dump(mode="json"),
        versions=installed_versions(),
        hardware=hardware(),
        command=list(arguments.command),
        elapsed_s=time.perf_counter() - started,
    )


@dataclass
class _Measured:
    """What is known of one split so far."""

    update: BenchUpdate | None = None
    memory: MemoryPeak | None = None
    resident_bytes: int | None = None
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    loss: float | None = None
    failure: str | None = None


class _Trial:
    """All splits on one pool of ranks."""

    def __init__(self, prepared: Bench, pools: RankPools, progress: Progress) -> None:
        self._prepared, self._progress = prepared, progress
        self._pool = pools.get(prepared.whole.case.batch.world_size)
        self._measured = {split: _Measured() for split in prepared.splits}

    def run(self) -> dict[EffectiveBatch, _Measured]:
        for stage, work in (("verifying the updates", self._verify), ("measuring memory", self._weigh)):
            self._progress.stage(stage)
            for split in self._prepared.splits:
                self._attempt(split, work)
        for number in range(self._prepared.rounds):
            self._progress.stage(f"round {number + 1} of {self._prepared.rounds}")
            for position in in_turn(len(self._prepared.splits), number):
                self._attempt(self._prepared.splits[position], self._time)
        return self._measured

    def _attempt(self, split: EffectiveBatch, work: Callable[[EffectiveBatch, _Measured], None]) -> None:
        """A split that cannot be run leaves the others as they are."""
        measured = self._measured[split]
        if measured.failure is not None:
            return
        self._progress.detail(f"N = {split.accumulation_steps}, B = {split.micro_batch}")
        try:
            work(split, measured)
        except RankFailed as error:
            measured.failure = " ".join(str(error).split())

    def _verify(self, split: EffectiveBatch, measured: _Measured) -> None:
        copy = self._prepared.copy
        case = copy.case.split(split.accumulation_steps, split.micro_batch)
        try:
            found = examine(replace(copy, case=case), self._pool, self._progress, EXTENT)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            measured.update = BenchUpdate(verdict=None, causes=[], ratio=None, reason=_NO_BIG_BATCH)
            return
        verdict = verdict_of(found.claims)
        open_claims = found.claims.which("fail" if verdict else "untested")
        reasons = [f"{claim}: {reason}" for claim, reason in found.reasons.items() if claim in open_claims]
        measured.update = BenchUpdate(
            verdict=verdict,
            causes=[cause.id for cause in found.causes],
            ratio=max((_error_over_bound(describe_step(step).update) for step in found.evidence.steps), default=None),
            reason=None if verdict == "equivalent" else "; ".join(reasons),
        )

    def _weigh(self, split: EffectiveBatch, measured: _Measured) -> None:
        peaks = self._pool.run(tasks.measure_memory, with_equal_rows(self._case(split)))
        measured.memory = max(peaks, key=lambda peak: peak.peak_bytes)

    def _time(self, split: EffectiveBatch, measured: _Measured) -> None:
        ran = self._pool.run(tasks.train, self._case(split))
        measured.seconds += [max(of_window) for of_window in zip(*(rank.seconds for rank in ran), strict=True)][
            WARM_UP_WINDOWS:
        ]
        measured.tokens += sum(sum(rank.targets[WARM_UP_WINDOWS:]) for rank in ran)
        grown = [rank.resident_bytes for rank in ran if rank.resident_bytes is not None]
        measured.resident_bytes = max([*grown, measured.resident_bytes or 0]) if grown else None
        measured.loss = ran[0].losses[-1]

    def _case(self, split: EffectiveBatch) -> Case:
        return self._prepared.whole.case.split(split.accumulation_steps, split.micro_batch)


def _as_verification(arguments: BenchArguments) -> VerifyArguments:
    return VerifyArguments(
        deepspeed=arguments.deepspeed,
        experiment=arguments.experiment,
        ranks=arguments.ranks,
        steps=STEPS,
        overrides=arguments.overrides,
        verbose=arguments.verbose,
    )


def _substitutions(prepared: Bench) -> list[str]:
    """What was measured in place of what was written, and what else was verified."""
    whole, copy = prepared.whole.substitutions, prepared.copy.substitutions
    return [*whole, *(f"updates: {line}" for line in copy if line not in whole)]


def _candidate(split: EffectiveBatch, measured: _Measured) -> CandidateRecord:
    return CandidateRecord(
        accumulation_steps=split.accumulation_steps,
        micro_batch=split.micro_batch,
        failure=measured.failure,
        memory=None if measured.memory is None else _memory(measured.memory, measured.resident_bytes),
        time=_time(measured) if measured.seconds else None,
        update=measured.update,
        loss=measured.loss,
    )


def _memory(peak: MemoryPeak, resident_bytes: int | None) -> BenchMemory:
    stands = peak.by_category["parameter"] + peak.by_category["optimizer"]
    return BenchMemory(
        peak_bytes=peak.peak_bytes,
        added_bytes=peak.peak_bytes - stands,
        by_category=MemoryByCategory(**peak.by_category),
        gradient_buffer_bytes=peak.gradient_buffer_bytes,
        resident_bytes=resident_bytes,
        allocator_bytes=peak.allocator_bytes,
    )


def _time(measured: _Measured) -> BenchTime:
    seconds = measured.seconds
    return BenchTime(
        seconds=seconds,
        median_s=statistics.median(seconds),
        p95_s=_percentile_95(seconds),
        tokens_per_s=measured.tokens / sum(seconds),
    )


def _percentile_95(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]


def _error_over_bound(update: UpdateRecord) -> float:
    return update.error / update.bound if update.error is not None and update.bound else 0.0


def _workload(prepared: Bench) -> WorkloadRecord:
    whole = prepared.whole
    return WorkloadRecord(
        model=type(whole.model).__name__,
        parameters=whole.parameters,
        sequence_length=whole.case.experiment.data.sequence_length,
        precision=whole.case.precision,
        zero_stage=whole.case.zero_stage,
        data=whole.data,
        rounds=prepared.rounds,
        windows=len(whole.case.windows) - WARM_UP_WINDOWS,
        warm_up_windows=WARM_UP_WINDOWS,
    )
