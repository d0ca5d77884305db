"""A verification from arguments to a record. Reads as the method: run, compare with the truth, measure, judge, name."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

from dsaccum.config.errors import ConfigError
from dsaccum.loss import build_loss
from dsaccum.training.opening import installed_versions
from dsaccum.verification.cases.arguments import VerifyArguments
from dsaccum.verification.cases.case import Case, WindowChoice
from dsaccum.verification.cases.dropout import remove_dropout
from dsaccum.verification.cases.inputs import PreparedCase, likely_ranks, read_case
from dsaccum.verification.comparison.compare import compare
from dsaccum.verification.comparison.evidence import CaseEvidence
from dsaccum.verification.diagnosis.causes import UNKNOWN
from dsaccum.verification.diagnosis.diagnose import diagnose
from dsaccum.verification.diagnosis.judge import Judged, judge
from dsaccum.verification.fp32_products import full_products
from dsaccum.verification.measures.communication import judge_communication
from dsaccum.verification.measures.memory import MemoryPeak, judge_memory, memory_cases
from dsaccum.verification.progress import Progress
from dsaccum.verification.ranks.interface import TaskRunner
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.describe import describe_resumption, describe_step
from dsaccum.verification.records.hardware import hardware
from dsaccum.verification.records.parts import CommunicationRecord, MemoryRecord
from dsaccum.verification.records.record import (
    Cause,
    Claims,
    EffectiveBatchRecord,
    ModelRecord,
    VerifyRecord,
    verdict_of,
)
from dsaccum.verification.subject.capture import Start, WindowCapture
from dsaccum.verification.subject.faults import fault_of
from dsaccum.verification.subject.tasks import Ran, measure_memory_of, run_case


def verify(arguments: VerifyArguments, progress: Progress, pools: RankPools | None = None) -> VerifyRecord:
    """Carry out one verification.

    Args:
        arguments: what was asked for.
        progress: told what happens.
        pools: started ranks to use; None for ranks that start and end here.

    Raises:
        ConfigError: the input is wrong.
        RankFailed: a rank could not carry it out.
    """
    progress.stage("reading config, data and model")
    return verify_read(arguments, partial(read_case, arguments), progress, pools)


class Asked(Protocol):
    """What every verification is asked for, whatever it reads."""

    @property
    def ranks(self) -> int | None:
        """W; None for the likely number."""

    @property
    def fault(self) -> str | None:
        """To inject."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command line."""


def verify_read(
    arguments: Asked, read: Callable[[], PreparedCase], progress: Progress, pools: RankPools | None
) -> VerifyRecord:
    """The method, for any case.

    Args:
        arguments: what was asked for.
        read: gives the case; ranks start meanwhile.
        progress: told what happens.
        pools: started ranks to use; None for ranks that start and end here.

    Raises:
        ConfigError: the input is wrong.
        RankFailed: a rank could not carry it out.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        own = pools if pools is not None else stack.enter_context(RankPools())
        own.get(arguments.ranks or likely_ranks())  # they import their libraries while the input is read
        prepared = with_fault(read(), arguments.fault)
        examined = examine(prepared, own.get(prepared.case.batch.world_size), progress)
    return record_of(prepared, examined, started, arguments.command)


@dataclass(frozen=True)
class Extent:
    """What is measured beside what the optimizer did; by default everything.

    Attributes:
        memory: ``always``, ``never``, or ``undecided``: only where no other claim has failed, so that it can decide.
        trajectory: whether the further sight is computed on which no verdict rests.
    """

    memory: Literal["always", "undecided", "never"] = "always"
    trajectory: bool = True


EVERYTHING = Extent()


@dataclass(frozen=True)
class Measured:
    """What has windows of its own, and what follows from it."""

    communication: CommunicationRecord
    memory: MemoryRecord
    traffic_claim: Judged
    memory_claim: Judged


@dataclass(frozen=True)
class Examined:
    """A case that was run, compared with its truth, judged, and what is wrong explained."""

    evidence: CaseEvidence
    measured: Measured
    ran: Ran
    claims: Claims
    reasons: dict[str, str]
    causes: list[Cause]


def examine(prepared: PreparedCase, pool: TaskRunner, progress: Progress, extent: Extent = EVERYTHING) -> Examined:
    """Run the case on the ranks, work out what it should have done, measure, judge, name.

    Args:
        prepared: the case.
        pool: of as many ranks as the case wants.
        progress: told what happens.
        extent: what is measured beside.

    Raises:
        ConfigError: the input is wrong, as only a rank could find out.
        RankFailed: a rank could not carry it out.
    """
    case = prepared.case
    progress.stage(f"running {len(case.windows)} windows on {_ranks(case)}")
    starts, captures, runs = run_windows(case, pool, progress)
    progress.stage("computing the reference")
    with full_products():
        evidence = compare(
            case,
            prepared.model,
            prepared.loss,
            starts,
            captures,
            runs,
            progress,
            with_trajectory=extent.trajectory,
            saved=prepared.saved,
        )
    measured, findings = _measure(evidence, pool, runs, extent, progress)
    evidence = replace(evidence, findings=findings)
    kept = evidence.without_overflows()
    claims, reasons = judge(kept, {"communication": measured.traffic_claim, "memory": measured.memory_claim})
    causes = diagnose(kept, _failed(claims, reasons))
    if case.resumed is None and any(_ambiguous(cause) for cause in causes):  # with N + 1 it would be another run
        causes = _told_apart(causes, prepared, pool, progress)
    return Examined(evidence, measured, runs[0], claims, reasons, causes)


def with_fault(prepared: PreparedCase, identifier: str | None) -> PreparedCase:
    """The same with dropout off, and with a fault that is injected: what that asks for is asked of both sides.

    Raises:
        ConfigError: there is no such fault, or the case cannot show it.
    """
    fault, case = fault_of(identifier), replace(prepared.case, fault=identifier)
    unfit = fault.inapplicable(case, prepared.model)
    prepared = _without_dropout(prepared)
    if identifier is None:
        return prepared
    if unfit is not None:
        problem = f"cannot show itself here: {unfit.reason}"
        raise ConfigError(problem, key="--inject", value=identifier, fix=unfit.fix)
    asked = fault.request(case)
    factory = asked.experiment.loss.factory
    loss = prepared.loss if factory == case.experiment.loss.factory else build_loss(factory, source=case.source)
    return replace(prepared, case=asked, loss=loss, model=fault.request_model(prepared.model))


def _without_dropout(prepared: PreparedCase) -> PreparedCase:
    model = copy.deepcopy(prepared.model)
    removed = remove_dropout(model)
    if not removed:
        return replace(prepared, model=model)
    more = f" and {len(removed) - 1} more" if len(removed) > 1 else ""
    note = f"dropout is 0 on both sides ({removed[0]}{more}): with masks no split of a batch equals another"
    return replace(prepared, model=model, substitutions=[*prepared.substitutions, note])


def _told_apart(causes: list[Cause], prepared: PreparedCase, pool: TaskRunner, progress: Progress) -> list[Cause]:
    """Run once more with N + 1, where mistakes that look alike at this N do not, and keep what explains both."""
    case = prepared.case
    batch = case.batch
    progress.stage(f"telling {len(causes)} candidates apart with N = {batch.accumulation_steps + 1}")
    windows = tuple(WindowChoice(0, choice.probe) for choice in case.windows)  # longer ones are kept of the first alone
    other = case.split(batch.accumulation_steps + 1, batch.micro_batch).with_windows(windows)
    starts, captures, runs = run_windows(other, pool, progress)
    with full_products():
        evidence = compare(other, prepared.model, prepared.loss, starts, captures, runs, progress)
    again = {cause.id for cause in diagnose(evidence, _failed(*judge(evidence, {})))}
    ambiguous = [cause for cause in causes if _ambiguous(cause)]
    left = [cause for cause in ambiguous if cause.id in again]
    if not left or len(left) == len(ambiguous):
        return causes
    confidence = "certain" if len(left) == 1 else "ambiguous"
    decided = {"told_apart_at_accumulation_steps": batch.accumulation_steps + 1}
    kept = [each.model_copy(update={"confidence": confidence, "evidence": each.evidence | decided}) for each in left]
    return [cause for cause in causes if cause not in ambiguous] + kept


def _ambiguous(cause: Cause) -> bool:
    """One of several candidates."""
    return cause.confidence == "ambiguous" and cause.id != UNKNOWN


def _failed(claims: Claims, reasons: dict[str, str]) -> dict[str, str]:
    return {claim: reasons.get(claim, "") for claim in claims.which("fail")}


def run_windows(
    case: Case, pool: TaskRunner, progress: Progress
) -> tuple[list[Start], list[list[WindowCapture]], list[Ran]]:
    """Starts by rank; captures by window and rank; what each rank said in the end."""
    ranks = case.batch.world_size
    starts: dict[int, Start] = {}
    windows: dict[int, dict[int, WindowCapture]] = {}

    def receive(rank: int, message: Any) -> None:
        if isinstance(message, Start):
            starts[rank] = message
        elif isinstance(message, WindowCapture):
            windows.setdefault(message.step, {})[rank] = message
            if rank == 0:
                progress.detail(f"window {message.step - case.counters.step} of {len(case.windows)}")

    runs = pool.run(run_case, case, on_message=receive)
    by_window = [[windows[step][rank] for rank in range(ranks)] for step in sorted(windows)]
    return [starts[rank] for rank in range(ranks)], by_window, runs


def _measure(
    evidence: CaseEvidence, pool: TaskRunner, runs: list[Ran], extent: Extent, progress: Progress
) -> tuple[Measured, dict[str, dict[str, Any]]]:
    """Communication, from a window without capture that the ranks have run already, and memory."""
    case = evidence.case
    traffic, traffic_state, traffic_reason, traffic_finding = judge_communication([run.traffic for run in runs], case)
    traffic_claim = Judged(traffic_state, traffic_reason)
    decided = bool(judge(evidence.without_overflows(), {"communication": traffic_claim})[0].which("fail"))
    wanted = extent.memory == "always" or (extent.memory == "undecided" and not decided)
    peaks = _peaks(replace(case, resumed=None), pool, progress) if wanted else []
    memory, memory_state, memory_reason, memory_finding = judge_memory(peaks, case)
    findings = {each["id"]: each for each in (traffic_finding, memory_finding) if each is not None}
    return Measured(traffic, memory, traffic_claim, Judged(memory_state, memory_reason)), findings


def _peaks(case: Case, pool: TaskRunner, progress: Progress) -> list[list[MemoryPeak]]:
    """By case and rank."""
    progress.stage("measuring memory")
    peaks = []
    for split in memory_cases(case):
        progress.detail(f"N = {split.batch.accumulation_steps}, B = {split.batch.micro_batch}")
        peaks.append(pool.run(measure_memory_of, split))
    return peaks


def record_of(prepared: PreparedCase, examined: Examined, started: float, command: Sequence[str] = ()) -> VerifyRecord:
    """All of it.

    Args:
        prepared: the case.
        examined: what was found.
        started: ``time.perf_counter()`` when it began.
        command: the command line.
    """
    case, evidence, measured = prepared.case, examined.evidence, examined.measured
    batch = case.batch
    return VerifyRecord(
        verdict=verdict_of(examined.claims),
        loop=case.loop,
        claims=examined.claims,
        reasons=examined.reasons,
        causes=examined.causes,
        effective_batch=EffectiveBatchRecord(
            world_size=batch.world_size,
            micro_batch=batch.micro_batch,
            accumulation_steps=batch.accumulation_steps,
            total=batch.total,
        ),
        model=ModelRecord(class_name=type(prepared.model).__name__, parameters=prepared.parameters),
        precision=case.precision,
        accumulation_dtype=case.accumulation_dtype,
        zero_stage=case.zero_stage,
        truth="mixed" if evidence.mixed_truth else "float64",
        substitutions=[*prepared.substitutions, *_about_products(examined.ran.rounding_of_products)],
        unavailable=prepared.unavailable,
        remedies=examined.ran.remedies,
        warnings=prepared.warnings,
        fault=case.fault,
        resumed=describe_resumption(evidence),
        steps=[describe_step(step) for step in evidence.steps],
        communication=measured.communication,
        memory=measured.memory,
        trajectory=evidence.trajectory,
        experiment=case.experiment.model_dump(mode="json"),
        deepspeed_config=case.config,
        versions=installed_versions(),
        hardware=hardware(),
        command=list(command),
        elapsed_s=time.perf_counter() - started,
    )


def _about_products(rounding: float) -> list[str]:
    if not rounding:
        return []
    moved = f"your settings round them (TF32, say), which moves the loss of one micro-batch by {rounding:.1e} of itself"
    return [f"fp32 products are computed in full: {moved}"]


def _ranks(case: Case) -> str:
    return f"{case.batch.world_size} rank{'s' if case.batch.world_size > 1 else ''}"
