"""What one window communicates: measured by two witnesses on each rank, judged against the formula in the parent.

The first witness sees every ``c10d`` operation below all names, but only on the threads of forward and backward. The
second, DeepSpeed's comms logger, sits in ``deepspeed.comm`` and sees every thread, but nothing that calls
``torch.distributed`` itself. So they are compared where both look, function by function, and what passed the logger by
is listed by class: control traffic of a loop may, gradients and parameters may not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from dsaccum.instruments.collectives import (
    CONTROL,
    ELSEWHERE,
    Collective,
    CollectiveRecorder,
    MicroStepTraffic,
    comms_logger_bytes,
)
from dsaccum.instruments.traffic import ExpectedTraffic, expected_traffic, plan_of, wrapper_kind
from dsaccum.verification.case import Case
from dsaccum.verification.loops import Subject
from dsaccum.verification.record import ClaimState, CommunicationRecord, MicroStepRecord

OF_OBJECTS: Final = ("all_gather_object", "broadcast_object_list", "barrier", "monitored_barrier")
"""Functions of ``deepspeed.comm`` that take no tensor: its logger counts 0 bytes."""
REDUCED_EVERY_MICRO_STEP: Final = "reduced-every-micro-step"


@dataclass(frozen=True)
class Traffic:
    """What one window communicated on one rank; bytes are those that this rank handed in.

    Attributes:
        zero_stage: 0 to 3.
        wrapper: kind of DeepSpeed's wrapper around the optimizer, as in ``instruments.traffic``.
        measured: of micro-steps 1 to the last; what a loop sends around its window counts to the nearest one.
        expected: the same by the formula, of micro-steps 1 to N.
        deepspeed_control_bytes: control bytes of each micro-step that DeepSpeed sent, the loop's own left out.
        gradient_operations: how many operations carried gradients, by micro-step.
        step_calls: of ``engine.step()``; N if all is well.
        optimizer_steps: micro-steps, from 1, in which the optimizer stepped; (N,) if all is well.
        without_gradient: trained parameters that no micro-batch of the window used.
        dispatcher_bytes: by function of ``deepspeed.comm``, as the first witness saw them.
        logger_bytes: the same as DeepSpeed's comms logger counted them.
        past_the_logger: by class, what the first witness saw that did not come through ``deepspeed.comm``.
    """

    zero_stage: int
    wrapper: str
    measured: tuple[MicroStepTraffic, ...]
    expected: tuple[ExpectedTraffic, ...]
    deepspeed_control_bytes: tuple[int, ...]
    gradient_operations: tuple[int, ...]
    step_calls: int
    optimizer_steps: tuple[int, ...]
    without_gradient: tuple[str, ...]
    dispatcher_bytes: dict[str, int]
    logger_bytes: dict[str, int]
    past_the_logger: dict[str, int]

    @property
    def gradient_bytes(self) -> list[int]:
        """By micro-step."""
        return [micro_step.gradient_bytes for micro_step in self.measured]

    @property
    def expected_gradient_bytes(self) -> list[int]:
        """By micro-step, of the formula."""
        return [micro_step.gradient_bytes for micro_step in self.expected]

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
    # Before the first micro-step counts to the first anyway; a loop's last exchange counts to the last.
    operations = [replace(each, micro_step=min(each.micro_step, last)) for each in recorder.operations]
    recorder.operations = operations
    trained = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    ever_used = set().union(*used.values())
    return Traffic(
        zero_stage=int(engine.zero_optimization_stage()),
        wrapper=wrapper_kind(engine),
        measured=tuple(recorder.per_micro_step()),
        expected=_expected(engine, trained, used),
        deepspeed_control_bytes=tuple(_control_bytes(operations, step) for step in range(1, last + 1)),
        gradient_operations=tuple(_gradient_operations(operations, step) for step in range(1, last + 1)),
        step_calls=recorder.step_calls,
        optimizer_steps=tuple(recorder.optimizer_steps),
        without_gradient=tuple(name for name in trained if name not in ever_used),
        dispatcher_bytes=_sums((each.entrance, each) for each in operations if each.entrance is not None),
        logger_bytes=dict(logged),
        past_the_logger=_sums((each.kind, each) for each in operations if each.entrance is None),
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


def _expected(engine: Any, trained: Sequence[str], used: dict[int, set[str]]) -> tuple[ExpectedTraffic, ...]:
    """The formula for each micro-step. ZeRO 2 and 3 reduce what that micro-step used, the others what the window did."""
    ever: set[str] = set().union(*used.values())

    def plan(seen: Collection[str]) -> list[ExpectedTraffic]:
        return expected_traffic(plan_of(engine, [name for name in trained if name not in seen]))

    whole = plan(ever)
    if engine.zero_optimization_stage() < 2:
        return tuple(whole)
    return tuple(plan(used.get(each.micro_step, ever))[each.micro_step - 1] for each in whole)


def _control_bytes(operations: Sequence[Collective], micro_step: int) -> int:
    return sum(
        each.input_bytes
        for each in operations
        if each.micro_step == micro_step and each.kind == CONTROL and each.phase != ELSEWHERE
    )


def _gradient_operations(operations: Sequence[Collective], micro_step: int) -> int:
    return sum(each.micro_step == micro_step and each.kind == "gradient" for each in operations)


def _sums(labelled: Iterator[tuple[str, Collective]] | Any) -> dict[str, int]:
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
    state, reason = _verdict(traffic_by_rank, case)
    findings = [_finding(traffic) for traffic in traffic_by_rank] if state == "fail" else []
    finding = findings[0] if findings and all(findings) else None
    return _record(traffic_by_rank, reason), state, reason, finding


def _verdict(traffic_by_rank: Sequence[Traffic], case: Case) -> tuple[ClaimState, str]:
    for rank, traffic in enumerate(traffic_by_rank):
        if (problem := _problem(traffic, f"rank {rank}")) is not None:
            return problem
    for rank, traffic in enumerate(traffic_by_rank):
        if (doubt := _doubt(traffic, f"rank {rank}")) is not None:
            return doubt
    return "pass", _what_holds(traffic_by_rank[0], case)


def _problem(traffic: Traffic, where: str) -> tuple[ClaimState, str] | None:
    """How the bytes differ from the formula; None where they don't."""
    measured, expected = traffic.gradient_bytes, traffic.expected_gradient_bytes
    steps = len(expected)
    if traffic.step_calls != steps:
        calls = f"{where} called engine.step() {traffic.step_calls} times in a window of {steps} micro-batches"
        if sum(measured) != sum(expected):
            return "fail", f"{calls}, with {sum(measured):,} gradient bytes where {sum(expected):,} are due"
        return "untested", f"{calls}: its micro-steps cannot be told apart"
    off = [index for index in range(steps) if measured[index] != expected[index]]
    if not off:
        return None
    more = f" (and {len(off) - 1} micro-steps more)" if len(off) > 1 else ""
    first = off[0]
    return "fail", (
        f"{where}, micro-step {first + 1} of {steps}: {measured[first]:,} gradient bytes, "
        f"{expected[first]:,} are due at ZeRO {traffic.zero_stage}{more}"
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
    once = f"{traffic.expected_gradient_bytes[-1]:,} gradient bytes"
    steps = len(traffic.expected)
    if steps == 1:
        claim = f"{once} in the only micro-step, as the formula says"
    elif traffic.zero_stage < 2:
        claim = f"{once} at micro-step {steps}, none before it"
    else:
        each = "at every micro-step" if len(set(traffic.gradient_bytes)) == 1 else "at the last micro-step"
        claim = f"{once} {each}: ZeRO {traffic.zero_stage} reduces at each by design, as the formula says"
    alone = "; with one rank the collectives are called, but nothing crosses a wire"
    return claim + (alone if case.batch.world_size == 1 else "")


def _finding(traffic: Traffic) -> dict[str, Any] | None:
    """The whole traffic N times: equal bytes at each micro-step before the boundary, and still one optimizer step."""
    measured, steps = traffic.gradient_bytes, len(traffic.expected)
    early = measured[:-1]
    if traffic.zero_stage > 1 or len(measured) != steps or traffic.optimizer_steps != (steps,):
        return None
    if len(set(early)) != 1 or early[0] == 0:
        return None
    return {
        "id": REDUCED_EVERY_MICRO_STEP,
        "evidence": {
            "zero_stage": traffic.zero_stage,
            "gradient_bytes": measured,
            "expected_gradient_bytes": traffic.expected_gradient_bytes,
        },
    }


def _record(traffic_by_rank: Sequence[Traffic], reason: str) -> CommunicationRecord:
    first = traffic_by_rank[0]
    return CommunicationRecord(
        per_micro_step=[
            MicroStepRecord(
                micro_step=each.micro_step,
                operations=each.operations,
                gradient_bytes=each.gradient_bytes,
                parameter_bytes=each.parameter_bytes,
                control_bytes=each.control_bytes,
            )
            for each in first.measured
        ],
        expected_gradient_bytes=first.expected_gradient_bytes[-1],
        only_at_boundary=all(_only_at_boundary(traffic) for traffic in traffic_by_rank),
        witnesses=_witnesses(first, agree=all(traffic.witnesses_agree for traffic in traffic_by_rank)),
        reason=reason,
    )


def _only_at_boundary(traffic: Traffic) -> bool:
    return not any(traffic.gradient_bytes[:-1]) and traffic.step_calls == len(traffic.expected)


def _witnesses(traffic: Traffic, *, agree: bool) -> dict[str, Any]:
    """Rank 0's figures of both; ``agree`` is that of all ranks."""
    return {
        "agree": agree,
        "dispatcher": traffic.dispatcher_bytes,
        "deepspeed_comms_logger": traffic.logger_bytes,
        "past_the_logger": traffic.past_the_logger,
        "deepspeed_control_bytes": {
            "measured": list(traffic.deepspeed_control_bytes),
            "expected": [each.control_bytes for each in traffic.expected],
        },
        "gradient_operations": {
            "measured": list(traffic.gradient_operations),
            "expected": [list(each.gradient_operations) for each in traffic.expected],
        },
        "without_gradient": list(traffic.without_gradient),
    }
