"""What one window communicates: measured by two witnesses on each rank, judged against the formula in the parent.

The first witness sees every ``c10d`` operation below all names, but only on the threads of forward and backward. The
second, DeepSpeed's comms logger, sits in ``deepspeed.comm`` and sees every thread, but nothing that calls
``torch.distributed`` itself. So they are compared where both look, function by function, and what passed the logger by
is listed by class: control traffic of a loop may, gradients and parameters may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from dsaccum.instruments.collectives import (
    CONTROL,
    ELSEWHERE,
    GRADIENT,
    Collective,
    CollectiveRecorder,
    MicroStepTraffic,
    comms_logger_bytes,
)
from dsaccum.instruments.traffic import ExpectedTraffic, TrafficPlan, expected_traffic, plan_of
from dsaccum.verification.cases.case import Case
from dsaccum.verification.records.record import ClaimState, CommunicationRecord, MicroStepRecord
from dsaccum.verification.subject.loops import Subject

OF_OBJECTS: Final = ("all_gather_object", "broadcast_object_list", "barrier", "monitored_barrier")
"""Functions of ``deepspeed.comm`` that take no tensor: its logger counts 0 bytes."""
REDUCED_EVERY_MICRO_STEP: Final = "reduced-every-micro-step"


@dataclass(frozen=True)
class Traffic:
    """What one window communicated on one rank; bytes are those that this rank handed in.

    Attributes:
        measured: of micro-steps 1 to the last; what a loop sends around its window counts to the nearest one.
        deepspeed_control_bytes: of each micro-step, control bytes without what the loop itself sent.
        gradient_operations: of each micro-step, how many operations carried gradients.
        optimizer_steps: micro-steps, from 1, in which the optimizer stepped; (N,) if all is well.
        step_calls: of ``engine.step()``; N if all is well.
        plan: what the formula needs to know of the engine and of what the window used.
        plans: the same of what each micro-step used, which is what ZeRO 2 and 3 reduce there.
        without_gradient: trained parameters that no micro-batch of the window used.
        dispatcher_bytes: by function of ``deepspeed.comm``, as the first witness saw them.
        logger_bytes: the same as DeepSpeed's comms logger counted them.
        past_the_logger: by class, what the first witness saw that did not come through ``deepspeed.comm``.
    """

    measured: tuple[MicroStepTraffic, ...]
    deepspeed_control_bytes: tuple[int, ...]
    gradient_operations: tuple[int, ...]
    optimizer_steps: tuple[int, ...]
    step_calls: int
    plan: TrafficPlan
    plans: tuple[TrafficPlan, ...]
    without_gradient: tuple[str, ...]
    dispatcher_bytes: dict[str, int]
    logger_bytes: dict[str, int]
    past_the_logger: dict[str, int]

    @property
    def gradient_bytes(self) -> list[int]:
        """By micro-step."""
        return [micro_step.gradient_bytes for micro_step in self.measured]

    def expected(self, accumulation_steps: int) -> list[ExpectedTraffic]:
        """By the formula, of micro-steps 1 to N, whatever N the engine itself was told."""
        whole = [self.plan] * accumulation_steps
        used = [*self.plans, *whole][:accumulation_steps] if self.plan.stage >= 2 else whole
        plans = (replace(plan, accumulation_steps=accumulation_steps) for plan in used)
        return [expected_traffic(plan)[index] for index, plan in enumerate(plans)]

    @property
    def contradictions(self) -> dict[str, tuple[int, int]]:
        """Functions of ``deepspeed.comm`` whose bytes differ: (dispatcher's, logger's)."""
        ours, theirs = self.dispatcher_bytes, self.logger_bytes
        pairs = {name: (ours.get(name, 0), theirs.get(name, 0)) for name in sorted({*ours, *theirs} - {*OF_OBJECTS})}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def unconfirmed_bytes(self) -> int:
        """Gradient and parameter bytes that only the first witness could see."""
        return sum(size for kind, size in self.past_the_logger.items() if kind != CONTROL)

    @property
    def witnesses_agree(self) -> bool:
        """Equal bytes for every function of ``deepspeed.comm``, and no gradient or parameter went around it."""
        return not self.contradictions and not self.unconfirmed_bytes


def measure_traffic(subject: Subject, run_window: Callable[[], object]) -> Traffic:
    """Run one window without capture and count what it communicates; not the first one (ZeRO 3 also broadcasts there).

    Args:
        subject: the engine under test.
        run_window: makes the loop under test run one window.
    """
    engine = subject.engine
    recorder = CollectiveRecorder(engine)
    with _gradients_by_micro_step(engine, recorder) as used, comms_logger_bytes() as logged, recorder:
        run_window()
    last = max(recorder.step_calls, 1)
    steps = range(1, last + 1)
    # Before the first micro-step counts to the first anyway; a loop's last exchange counts to the last.
    recorder.operations = [replace(each, micro_step=min(each.micro_step, last)) for each in recorder.operations]
    here = {step: [each for each in recorder.operations if each.micro_step == step] for step in steps}
    trained = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    unused = [name for name in trained if not any(name in names for names in used.values())]
    return Traffic(
        measured=tuple(recorder.per_micro_step()),
        deepspeed_control_bytes=tuple(
            sum(each.input_bytes for each in here[step] if each.kind == CONTROL and each.phase != ELSEWHERE)
            for step in steps
        ),
        gradient_operations=tuple(sum(each.kind == GRADIENT for each in here[step]) for step in steps),
        optimizer_steps=tuple(recorder.optimizer_steps),
        step_calls=recorder.step_calls,
        plan=plan_of(engine, unused),
        plans=tuple(plan_of(engine, [name for name in trained if name not in used.get(step, ())]) for step in steps),
        without_gradient=tuple(unused),
        dispatcher_bytes=_sums((each.entrance, each) for each in recorder.operations if each.entrance is not None),
        logger_bytes=dict(logged),
        past_the_logger=_sums((each.kind, each) for each in recorder.operations if each.entrance is None),
    )


@contextmanager
def _gradients_by_micro_step(engine: Any, recorder: CollectiveRecorder) -> Iterator[dict[int, set[str]]]:
    """Which trained parameters receive a gradient in which micro-step, from 1."""
    used: dict[int, set[str]] = {}

    def note(name: str) -> None:
        used.setdefault(recorder.now, set()).add(name)

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: note(name))
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield used
    finally:
        for hook in hooks:
            hook.remove()


def _sums(labelled: Iterable[tuple[str, Collective]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for label, operation in labelled:
        sums[label] = sums.get(label, 0) + operation.input_bytes
    return sums


def judge_communication(
    traffic_by_rank: Sequence[Traffic], case: Case
) -> tuple[CommunicationRecord, ClaimState, str, dict[str, Any] | None]:
    """Did each rank communicate what the formula says, at each micro-step, and do both witnesses say so?

    Args:
        traffic_by_rank: of one window of the case.
        case: what was verified.

    Returns:
        What goes into the record (of rank 0), the state of the claim, the reason for it, and the finding
        ``reduced-every-micro-step`` with its evidence where the figures show that.
    """
    if not traffic_by_rank:
        reason = "no window was measured"
        return CommunicationRecord(reason=reason), "untested", reason, None
    steps = case.batch.accumulation_steps
    looks = [_problem(each, steps, f"rank {rank}") for rank, each in enumerate(traffic_by_rank)]
    looks += [_doubt(each, f"rank {rank}") for rank, each in enumerate(traffic_by_rank)]
    state, reason = next(filter(None, looks), ("pass", _what_holds(traffic_by_rank[0], case)))
    findings = [_finding(traffic, steps) for traffic in traffic_by_rank]
    finding = findings[0] if state == "fail" and all(findings) else None
    return _record(traffic_by_rank, steps, reason), state, reason, finding


def _due(traffic: Traffic, steps: int) -> list[int]:
    return [each.gradient_bytes for each in traffic.expected(steps)]


def _problem(traffic: Traffic, steps: int, where: str) -> tuple[ClaimState, str] | None:
    """How the bytes differ from the formula; None where they don't."""
    measured, due = traffic.gradient_bytes, _due(traffic, steps)
    if traffic.step_calls != steps:
        calls = f"{where} called engine.step() {traffic.step_calls} times in a window of {steps} micro-batches"
        if sum(measured) != sum(due):
            return "fail", f"{calls}, with {sum(measured):,} gradient bytes where {sum(due):,} are due"
        return "untested", f"{calls}: its micro-steps cannot be told apart"
    off = [index for index in range(steps) if measured[index] != due[index]]
    if not off:
        return None
    first = off[0]
    return "fail", (
        f"{where}, micro-step {first + 1} of {steps}: {measured[first]:,} gradient bytes, {due[first]:,} are due at "
        f"ZeRO {traffic.plan.stage}; {len(off)} of {steps} micro-steps differ"
    )


def _doubt(traffic: Traffic, where: str) -> tuple[ClaimState, str] | None:
    """How the witnesses differ; None where they agree."""
    for function, (ours, theirs) in traffic.contradictions.items():
        both = f"{where}: {ours:,} bytes of {function} seen below torch, {theirs:,} by DeepSpeed's comms logger"
        # The logger is DeepSpeed's own record: what it saw was sent. What it missed is merely unconfirmed.
        return ("fail", f"{both}; some were sent from elsewhere") if theirs > ours else ("untested", both)
    if traffic.unconfirmed_bytes:
        return "untested", (
            f"{where}: {traffic.unconfirmed_bytes:,} bytes of gradients or parameters went past deepspeed.comm, "
            "where there is no second witness"
        )
    return None


def _what_holds(traffic: Traffic, case: Case) -> str:
    steps, stage = case.batch.accumulation_steps, traffic.plan.stage
    once = f"{traffic.gradient_bytes[-1]:,} gradient bytes"
    if steps == 1:
        claim = f"{once} in the only micro-step, as the formula says"
    elif stage < 2:
        claim = f"{once} at micro-step {steps}, none before it"
    else:
        claim = f"ZeRO {stage} reduces at every micro-step by design, {once} at the last, all as the formula says"
    alone = "; with one rank the collectives are called, but nothing crosses a wire"
    return claim + (alone if case.batch.world_size == 1 else "")


def _finding(traffic: Traffic, steps: int) -> dict[str, Any] | None:
    """The whole traffic N times: equal bytes at each micro-step before the boundary, and still one optimizer step."""
    measured = traffic.gradient_bytes
    early = set(measured[:-1])
    once = traffic.plan.stage < 2 and traffic.step_calls == steps and traffic.optimizer_steps == (steps,)
    if not once or len(early) != 1 or 0 in early:
        return None
    return {
        "id": REDUCED_EVERY_MICRO_STEP,
        "zero_stage": traffic.plan.stage,
        "gradient_bytes": measured,
        "expected_gradient_bytes": _due(traffic, steps),
    }


def micro_step_records(traffic: Iterable[MicroStepTraffic]) -> list[MicroStepRecord]:
    """One rank's traffic, by micro-step."""
    return [
        MicroStepRecord(
            micro_step=each.micro_step,
            operations=each.operations,
            gradient_bytes=each.gradient_bytes,
            parameter_bytes=each.parameter_bytes,
            control_bytes=each.control_bytes,
        )
        for each in traffic
    ]


def _record(traffic_by_rank: Sequence[Traffic], steps: int, reason: str) -> CommunicationRecord:
    first = traffic_by_rank[0]
    return CommunicationRecord(
        per_micro_step=micro_step_records(first.measured),
        expected_gradient_bytes=_due(first, steps)[-1],
        only_at_boundary=all(_is_only_at_boundary(traffic, steps) for traffic in traffic_by_rank),
        witnesses=_witnesses(first, steps, agree=all(traffic.witnesses_agree for traffic in traffic_by_rank)),
        reason=reason,
    )


def _is_only_at_boundary(traffic: Traffic, steps: int) -> bool:
    *early, last = traffic.gradient_bytes
    return traffic.step_calls == steps and last > 0 and not any(early)


def _witnesses(traffic: Traffic, steps: int, *, agree: bool) -> dict[str, Any]:
    """Rank 0's figures of both; ``agree`` is that of all ranks."""
    expected = traffic.expected(steps)
    return {
        "agree": agree,
        "dispatcher": traffic.dispatcher_bytes,
        "deepspeed_comms_logger": traffic.logger_bytes,
        "past_the_logger": traffic.past_the_logger,
        "deepspeed_control_bytes": {
            "measured": list(traffic.deepspeed_control_bytes),
            "expected": [each.control_bytes for each in expected],
        },
        "gradient_operations": {
            "measured": list(traffic.gradient_operations),
            "expected": [list(each.gradient_operations) for each in expected],
        },
        "without_gradient": list(traffic.without_gradient),
    }
