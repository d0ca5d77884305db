"""What ranks exchange in a watched window, against what the kind of run is due to exchange at each micro-step.

Only this is held to be true: at ZeRO 0 and 1 no gradient crosses the wire before the boundary. ZeRO 2 and 3 reduce at
each micro-step by design, DDP does where it is not told to wait: the gradient is right, at N times the traffic.
"""

from __future__ import annotations

from dsaccum.verification.measures.communication import REDUCED_EVERY_MICRO_STEP, micro_step_records
from dsaccum.verification.records.parts import CommunicationRecord
from dsaccum.verification.records.record import ClaimState
from dsaccum.watch.window import RankWindow, WatchedWindow

MUCH_CONTROL = 1024
"""Bytes in a micro-step: an engine's own flags and norms are less."""
State = tuple[ClaimState, str | None]


def judge_communication(window: WatchedWindow, *, boundary_right: bool) -> State:
    """The claim's state, and the reason for it; where the boundary is another than the config's, nothing is told."""
    facts, ranks = window.facts, window.ranks
    if facts.kind == "bare":
        return "not_applicable", "there is one process"
    if reason := next((rank.measured.reason for rank in ranks if rank.measured.reason), None):
        return "untested", f"not measured: {reason}"
    if not boundary_right:
        return "untested", "the window is not the config's, and so its boundary is not, either"
    if early := reduced_early(window):
        if facts.zero_stage is not None and facts.zero_stage < 2:
            return _before_the_boundary(early, facts.zero_stage)
        if facts.zero_stage is None and facts.kind != "FSDP2" and not early.expected_gradient_bytes:
            return "untested", "gradients are reduced by the script itself, before the boundary too"
    for rank in ranks:
        due, seen = rank.expected_gradient_bytes, _bytes(rank)
        if not sum(seen):
            return "untested", f"rank {rank.rank}: no gradient was seen crossing the wire"
        if not seen[-1]:
            return "untested", f"rank {rank.rank}: no gradient crossed the wire in the window's last micro-step"
        if due and due != seen:
            return "untested", f"rank {rank.rank}: {_listed(seen)} gradient bytes, where {_listed(due)} are expected"
    return "pass", None


def _before_the_boundary(rank: RankWindow, stage: int) -> State:
    """Less than a whole gradient may be something else: batch statistics, too, are reduced in backward."""
    found = f"rank {rank.rank}: {max(_early(rank)):,} gradient bytes in a micro-step before the boundary"
    whole = rank.expected_gradient_bytes[-1] if rank.expected_gradient_bytes else None
    if whole and max(_early(rank)) >= whole:
        return "fail", f"{found}, none are due at ZeRO {stage}"
    return "untested", f"{found}, which are not the whole gradient"


def reduced_early(window: WatchedWindow) -> RankWindow | None:
    """A rank that hands in gradients before the window's last micro-step."""
    return next((rank for rank in window.ranks if any(_early(rank))), None)


def communication_notes(window: WatchedWindow) -> list[str]:
    """DDP that was not told to wait: no mistake, and costly."""
    early = reduced_early(window)
    if window.facts.kind != "DDP" or early is None or not _bytes(early)[-1]:
        return _others_traffic(window)
    often = sum(size > 0 for size in _bytes(early))
    return [
        *_others_traffic(window),
        f"{REDUCED_EVERY_MICRO_STEP}: gradients were reduced at {often} of {window.micro_steps} micro-steps, and once "
        "is enough: put all but the last under model.no_sync(), forward and backward",
    ]


def _others_traffic(window: WatchedWindow) -> list[str]:
    """What other engines of this process reduce is no gradient of this one's."""
    first = window.ranks[0].measured
    if not first.others or max((each.control_bytes for each in first.traffic), default=0) < MUCH_CONTROL:
        return []
    return ["several models are trained in this process: control traffic holds the gradients of the others"]


def communication_record(window: WatchedWindow) -> CommunicationRecord:
    """Rank 0's figures."""
    first = window.ranks[0]
    if first.measured.reason:
        return CommunicationRecord(reason=first.measured.reason)
    due = first.expected_gradient_bytes
    return CommunicationRecord(
        per_micro_step=micro_step_records(first.measured.traffic),
        expected_gradient_bytes=due[-1] if due else None,
        only_at_boundary=reduced_early(window) is None and all(_bytes(rank)[-1:] > [0] for rank in window.ranks),
        reason=_why_early(window),
    )


def _why_early(window: WatchedWindow) -> str | None:
    stage = window.facts.zero_stage
    if reduced_early(window) is None:
        return None
    if stage is not None:
        return f"ZeRO {stage} reduces at every micro-step by design" if stage >= 2 else "some before the boundary"
    kind = window.facts.kind
    return f"{kind} reduces wherever it is not told to wait" if kind in ("DDP", "FSDP2") else "some before the boundary"


def _bytes(rank: RankWindow) -> list[int]:
    return [each.gradient_bytes for each in rank.measured.traffic]


def _early(rank: RankWindow) -> list[int]:
    return _bytes(rank)[:-1]


def _listed(sizes: list[int]) -> str:
    return ", ".join(f"{size:,}" for size in sizes)
