"""Is accumulation worth it here? A word for each split, its reason in figures, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from dsaccum.bench.record import BenchMemory, CandidateRecord, Word
from dsaccum.report.figures import size

LEAST_SAVING: Final = 0.05
"""A share of the peak; what saves less is no reason to take more micro-steps."""
_NAMES: Final = {
    "parameter": "parameters", "gradient": "gradients", "activation": "activations", "optimizer": "optimizer states",
    "temporary": "temporary buffers",
}  # fmt: skip


def judged(candidates: Sequence[CandidateRecord]) -> list[CandidateRecord]:
    """The same with a word and its reason, against the split with the fewest micro-steps that ran.

    That one is compared with nobody: it has a word only where its own update is wrong.
    """
    base = next((each for each in candidates if each.memory is not None), None)
    return [_judged(each, base) for each in candidates]


def overall(candidates: Sequence[CandidateRecord]) -> tuple[Word | None, str]:
    """The word for the whole: no wrong update is outweighed by memory, and one way that saves is enough.

    Args:
        candidates: judged.
    """
    for word in ("reject", "accept", "tune"):
        found = [each for each in candidates if each.word == word]
        if found:
            best = recommended(found)
            return best.word, f"N = {best.accumulation_steps}, B = {best.micro_batch}: {best.reason}"
    return None, "no two splits ran whose memory could be compared"


def recommended(candidates: Sequence[CandidateRecord]) -> CandidateRecord:
    """The quickest of those that need hardly more memory than the one that needs least.

    Args:
        candidates: at least one.
    """
    peaks = [each.memory.peak_bytes for each in candidates if each.memory is not None]
    enough = (1 + LEAST_SAVING) * min(peaks, default=0)
    frugal = [each for each in candidates if each.memory is not None and each.memory.peak_bytes <= enough]
    return min(frugal or candidates, key=lambda each: each.time.median_s if each.time else math.inf)


def _judged(candidate: CandidateRecord, base: CandidateRecord | None) -> CandidateRecord:
    word, reason = _word(candidate, base)
    return candidate.model_copy(update={"word": word, "reason": reason})


def _word(candidate: CandidateRecord, base: CandidateRecord | None) -> tuple[Word | None, str]:
    update = candidate.update
    if update is not None and update.verdict == "not_equivalent":
        return "reject", f"its update differs from the big batch's ({', '.join(update.causes) or 'no cause named'})"
    if candidate.memory is None or base is None or base.memory is None:
        return None, candidate.failure or ""
    if candidate is base:
        return None, "the others are compared with it"
    if update is None or update.verdict is None:
        return None, f"its update could not be verified: {update.reason if update else 'not tried'}"
    saved = base.memory.peak_bytes - candidate.memory.peak_bytes
    share = saved / base.memory.peak_bytes
    if share >= LEAST_SAVING:
        return "accept", f"the same update with {size(saved)} ({share:.0%}) less memory{_price(candidate, base)}"
    return "tune", f"the same update, and no memory saved: {_why_not(candidate.memory, base.memory)}"


def _price(candidate: CandidateRecord, base: CandidateRecord) -> str:
    if candidate.time is None or base.time is None:
        return ""
    return f", at {candidate.time.median_s / base.time.median_s:.2f} x the time of N = {base.accumulation_steps}"


def _why_not(memory: BenchMemory, base: BenchMemory) -> str:
    """What the peak consists of, where smaller micro-batches do not lower it."""
    activations = base.by_category.activation or 0
    if activations < LEAST_SAVING * base.peak_bytes:
        largest, amount = largest_category(base)
        return (
            f"at the peak of {size(base.peak_bytes)} activations are {size(activations)}, and {_NAMES[largest]} "
            f"{size(amount)}: the size of a micro-batch hardly matters"
        )
    changes = {
        name: (getattr(memory.by_category, name) or 0) - (getattr(base.by_category, name) or 0) for name in _NAMES
    }
    if sum(map(abs, changes.values())) < LEAST_SAVING * base.peak_bytes:
        largest, amount = largest_category(base)
        return (
            f"the peak of {size(base.peak_bytes)} is made of the same in both, most of it {_NAMES[largest]} "
            f"({size(amount)}): it is reached where micro-batches do not count, as in the optimizer's step"
        )
    grown = {name: change for name, change in changes.items() if change > 0}
    saved = sum(-change for change in changes.values() if change < 0)
    more = ", ".join(f"{size(change)} of {_NAMES[name]}" for name, change in grown.items()) or "nothing"
    return f"{size(saved)} saved, {more} added, {size(base.peak_bytes)} in all before"


def largest_category(memory: BenchMemory) -> tuple[str, int]:
    """What most of the peak is, and its bytes."""
    sizes = {name: getattr(memory.by_category, name) or 0 for name in _NAMES}
    name = max(sizes, key=lambda each: sizes[each])
    return name, sizes[name]


def advice(candidates: Sequence[CandidateRecord], config: dict[str, Any], checkpointing: bool) -> list[str]:
    """What would lower the least peak that was reached, the likeliest first.

    Args:
        candidates: judged.
        config: the DeepSpeed JSON.
        checkpointing: whether activations are recomputed already.
    """
    ran = [each.memory for each in candidates if each.memory is not None]
    if not ran:
        return []
    least = min(ran, key=lambda memory: memory.peak_bytes)
    largest, amount = largest_category(least)
    head = f"{_NAMES[largest]} are {size(amount)} of the least peak, {size(least.peak_bytes)}"
    ways = _ways(largest, config, checkpointing)
    return [f"{head}: {'; '.join(ways)}"] if ways else []


def _ways(category: str, config: dict[str, Any], checkpointing: bool) -> list[str]:
    section = config.get("zero_optimization", {})
    stage = int(section.get("stage") or 0)
    low = bool(config.get("bf16", {}).get("enabled") or config.get("fp16", {}).get("enabled"))
    if category == "activation":
        checkpoints = [] if checkpointing else ["model.activation_checkpointing: true recomputes them"]
        return checkpoints + ([] if low else ['"bf16" halves them'])
    if category == "optimizer":
        return [] if stage else ['"zero_optimization": {"stage": 1} shares them out among the ranks']
    if category == "gradient":
        return ['"zero_optimization": {"stage": 2} shares them out among the ranks'] if stage < 2 else []
    if category == "parameter":
        halved = [] if low else ['"bf16" halves them']
        return halved + (['"zero_optimization": {"stage": 3} shares them out among the ranks'] if stage < 3 else [])
    bucket = section.get("reduce_bucket_size", 500_000_000)
    return [f'"reduce_bucket_size" is {bucket:,} elements: a smaller one takes less'] if stage else []
