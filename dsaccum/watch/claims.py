"""What is held to be true of a watched window, and whether it is."""

from __future__ import annotations

from typing import Any

from dsaccum.report.figures import counted
from dsaccum.watch.communication import judge_communication
from dsaccum.watch.hand_clipping import clipped_by_hand
from dsaccum.watch.judge import Judged
from dsaccum.watch.memory import judge_memory
from dsaccum.watch.rows_fed import FedTwice, fed_twice, rows_text
from dsaccum.watch.z_loss import z_fault

State = tuple[str, str | None]
NO_WEIGHTS = "no weights of the micro-batches account for the gradient, so tokens have none"


def claims_of(judged: Judged) -> dict[str, State]:
    """Each claim's state, and why it is so."""
    boundary = _boundary(judged)
    return {
        "weighting": _weighting(judged),
        "gradient": _gradient(judged),
        "boundary": boundary,
        "clipping": _clipping(judged),
        "update": _update(judged),
        "samples": _samples(judged),
        "replicas": _replicas(judged),
        "communication": judge_communication(judged.window, boundary_right=boundary[0] != "fail"),
        "memory": judge_memory(judged.window),
    }


def _weighting(judged: Judged) -> State:
    if judged.tokens is None or judged.weighting is None:
        return "untested", judged.unreadable
    tokens = judged.tokens
    if tokens.misaligned:
        return "fail", f"the targets of {counted(tokens.misaligned, 'row')} belong to other inputs"
    if tokens.on_padding[0]:
        count, share = tokens.on_padding
        return "fail", f"{count} positions of padding weigh {share:.3g} of the whole"
    if tokens.unweighted or tokens.uncalled:
        return (
            "fail",
            f"{tokens.unweighted} targets have no weight, {tokens.uncalled} positions without a label have one",
        )
    if tokens.uneven:
        k, r = tokens.uneven[0]
        return "untested", (
            f"tokens of one micro-batch weigh differently (micro-step {k}, rank {r}): the loss itself weights them"
        )
    if not judged.explained:
        return "untested", NO_WEIGHTS
    for rank, check in enumerate(judged.weighting):
        if check.max_error is not None and not check.weights_right:
            if by_hand := clipped_by_hand(judged):
                return "untested", by_hand
            total = f"the window's tokens weigh {tokens.total:.4g} in all, where 1 is due"
            even = abs(tokens.total - 1) <= check.tolerance
            spread = f"a token weighs {tokens.smallest:.3g} to {tokens.largest:.3g}, where {tokens.expected:.3g} is due"
            return "fail", f"rank {rank}: " + (spread if even else total)
        if check.max_error is None:
            return "untested", check.recovered.reason
    return z_fault(tokens.z) or _not_by_tokens(judged) or ("pass", None)


def _not_by_tokens(judged: Judged) -> State | None:
    """Tokens that weigh what is due don't make one batch of what does not come from tokens."""
    ranks = judged.window.ranks
    if judged.past_outputs:
        return "untested", judged.past_outputs
    if name := next((rank.own_statistics for rank in ranks if rank.own_statistics), None):
        return "untested", f"{name} normalises each micro-batch by its own statistics, which are not the whole batch's"
    share, k, r = max(
        ((share, k, rank.rank) for rank in ranks for k, share in enumerate(rank.beside, start=1)), default=(0.0, 0, 0)
    )
    if not share:
        return None
    return "untested", (
        f"{share:.2g} of the gradient comes from another term of the loss than the tokens' (micro-step {k}, rank {r}): "
        "whether that one is divided as it should be, nobody can say"
    )


def _gradient(judged: Judged) -> State:
    for rank, check in enumerate(judged.way):
        if check.passed and check.max_error is not None:
            continue
        if check.max_error is not None and not check.weights_right:
            return (
                "fail",
                f"rank {rank}: a micro-batch's weight is off by {check.max_error:.2g} of what arrived at its loss",
            )
        worst = check.worst
        if check.off and worst is not None:
            return "fail", f"rank {rank}: {worst.name} is off by {worst.error:.2g}, bound {worst.bound:.2g}"
        return "untested", check.recovered.reason
    if unseen := max(rank.not_looked_at for rank in judged.window.ranks):
        return (
            "untested",
            f"{unseen:,} parameters were not looked at: their optimizer steps elsewhere, or other modules",
        )
    if judged.past_outputs:
        return "untested", judged.past_outputs
    if judged.factor is not None and judged.tokens is None:
        return "untested", (
            f"after backward everything was multiplied by {judged.factor:.4g}; without tokens to read, nobody can say "
            "whether that is due"
        )
    return "pass", None


def _boundary(judged: Judged) -> State:
    facts, window = judged.facts, judged.window
    first = window.ranks[0]
    if first.past_engine:
        return "fail", f"the optimizer was stepped past the engine, first after micro-step {first.past_engine[0]}"
    if facts.accumulation_steps is None:
        return "not_applicable", f"nobody says how many micro-batches make a window; {_seen(judged)}"
    held, due = first.micro_batches, facts.accumulation_steps
    if held == due or (held < due and weighs(judged, 1.0)):
        return "pass", None
    if facts.kind == "DeepSpeed":
        calls = f", {first.step_calls} calls of engine.step" if first.step_calls is not None else ""
        return "fail", f"{held} micro-steps led to this update, the config says {due}{calls}"
    # Without an engine a micro-step is a backward pass, of which a micro-batch may have several; and the last window of
    # an epoch may be short. Weights say whether that was reckoned with.
    if weighs(judged, 1.0):
        return "pass", None
    told = f"{counted(held, 'micro-step')} led to this update, {facts.framework} was told {due}"
    return ("fail" if held < due and judged.tokens is not None else "untested"), told


def _seen(judged: Judged) -> str:
    """How many, and in the window before."""
    held, before = judged.window.micro_steps, judged.facts.earlier_windows[-1:]
    if not before:
        return f"{held} seen"
    return f"{held} seen, as in the one before" if before[0] == held else f"{held} seen, {before[0]} in the one before"


def _clipping(judged: Judged) -> State:
    inside = clips_inside(judged)
    if inside:
        return "fail", f"clipped after micro-step {inside[0].after} of {judged.window.micro_steps}, too"
    if stale := judged.window.ranks[0].stale_clipped:
        return "fail", (
            f"the norm that was clipped by holds the gradients of all windows so far of {stale[0]}, which no optimizer "
            "has, and nobody cleared"
        )
    if judged.saw is None:
        return "untested", "the optimizer leaves no trace of the gradient that it got"
    if judged.saw.passed:
        return "pass", None
    if (after := judged.window.ranks[0].after_clipping) != 1.0:
        return "fail", (
            f"clipped before the gradient was multiplied by {after:.4g}: the limit of {judged.facts.clipping:g} acted "
            f"on one {1 / after:.4g} times as large as the optimizer's"
        )
    return "fail", f"the optimizer got {judged.saw.ratio or 0:.4g} times what is due"


def _update(judged: Judged) -> State:
    if judged.update is None:
        return "untested", judged.update_reason
    if judged.update.passed:
        return "pass", None
    worst = judged.update.worst
    assert worst is not None
    return (
        "fail",
        f"{worst.name} changed by another amount than is due, off by {worst.error:.2g}, bound {worst.bound:.2g}",
    )


def _samples(judged: Judged) -> State:
    shared = sharing(judged)
    if shared:
        return "fail", f"rank {shared[1]} was fed the same as rank {shared[0]}"
    pair = repeated(judged)
    if pair:
        return "fail", f"micro-steps {pair[0]} and {pair[1]} were fed the same"
    rows = rows_twice(judged)
    return ("fail", rows_text(rows)) if rows.wrong else ("pass", None)


def _replicas(judged: Judged) -> State:
    sums = [rank.checksums for rank in judged.window.ranks]
    if len(sums) < 2:
        return "not_applicable", "there is one rank"
    differing = [name for name in sums[0] if len({each.get(name) for each in sums}) > 1]
    if differing:
        return "fail", f"{len(differing)} parameters differ between ranks after the step, first {differing[0]}"
    return ("pass", None) if sums[0] else ("not_applicable", "no rank has whole parameters")


def weighs(judged: Judged, total: float) -> bool:
    """All tokens together."""
    if judged.tokens is None or judged.weighting is None or not judged.explained:
        return False
    return abs(judged.tokens.total / total - 1) <= 2 * judged.weighting[0].tolerance


def clips_inside(judged: Judged) -> list[Any]:
    """Calls before the window's last micro-step that changed something."""
    return [
        clip
        for rank in judged.window.ranks
        for clip in rank.clips
        if 0 < clip.after < judged.window.micro_steps and clip.acted
    ]


def sharing(judged: Judged) -> tuple[int, int] | None:
    """Two ranks that were fed the same at every micro-step."""
    ranks = judged.window.ranks
    for other in range(1, len(ranks)):
        for one in range(other):
            if ranks[one].inputs and ranks[one].inputs[0] and ranks[one].inputs == ranks[other].inputs:
                return one, other
    return None


def rows_twice(judged: Judged) -> FedTwice:
    """Single rows that came more than once."""
    ranks = judged.window.ranks
    return fed_twice([rank.row_prints for rank in ranks], [rank.calls for rank in ranks])


def repeated(judged: Judged) -> tuple[int, int] | None:
    """Two micro-steps of one rank that were fed the same."""
    for rank in judged.window.ranks:
        first: dict[Any, int] = {}
        for k, given in enumerate(rank.inputs):
            if given and given in first and rank.calls[first[given]] != rank.calls[k]:
                return first[given] + 1, k + 1
            first.setdefault(given, k)
    return None
