"""Communication and memory in a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.text import Text

from dsaccum.report.figures import numbered, size
from dsaccum.report.layout import listed
from dsaccum.verification.records.record import CommunicationRecord, MemoryByCategory, MemoryRecord, MicroStepRecord
from dsaccum.verification.records.watch import WindowMemory


def communication_lines(communication: CommunicationRecord, *, width: int) -> list[Text]:
    """Bytes of gradients against the formula, then each kind of micro-step."""
    if not communication.per_micro_step:
        return listed("communication", [_not_measured(communication.reason)], width=width)
    return listed("communication", _communication(communication), width=width)


def memory_lines(memory: MemoryRecord, *, width: int) -> list[Text]:
    """The peak and what it consists of, then other ways of splitting."""
    if memory.peak_bytes is None and not memory.runs:
        return listed("memory", [_not_measured(memory.reason)], width=width)
    return listed("memory", _memory(memory), width=width)


def window_memory_lines(memory: WindowMemory, *, width: int) -> list[Text]:
    """What a watched window's micro-steps leave behind."""
    activations = max((step.activation_bytes or 0 for step in memory.per_micro_step), default=None)
    if memory.growth_bytes is None or activations is None:
        return listed("memory", [_not_measured(memory.reason)] if memory.reason else [], width=width)
    more = size(max(memory.growth_bytes, 0))
    text = f"activations of {size(activations)} in a micro-step; {more} more before the last one than before the 2nd"
    return listed("memory", [text], width=width)


def _communication(communication: CommunicationRecord) -> Iterator[str]:
    steps = communication.per_micro_step
    sent = sum(step.gradient_bytes or 0 for step in steps)
    expected = communication.expected_gradient_bytes
    total = f"gradients of {sent:,} bytes per window on each rank"
    if communication.only_at_boundary:
        due = "" if expected is None else ", as expected" if sent == expected else f", expected {expected:,}"
        yield f"{total}{due}, only at the boundary"
    else:  # by design at ZeRO 2 and 3, or a fault: the reason says which
        yield f"{total}: {communication.reason}" if communication.reason else total
    for content, alike in groupby(steps, key=content_of):
        yield f"{numbered('micro-step', [step.micro_step for step in alike])}: {content}"


def content_of(step: MicroStepRecord) -> str:
    """Bytes and collectives of one micro-step."""
    kinds = {"gradients": step.gradient_bytes, "parameters": step.parameter_bytes, "control": step.control_bytes}
    amounts = [f"{kind} {size(amount)}" for kind, amount in kinds.items() if amount]
    operations = [f"{count} x {name}" for name, count in step.operations.items() if count]
    return ", ".join(amounts) + (f" ({', '.join(operations)})" if operations else "") if amounts else "nothing"


def _memory(memory: MemoryRecord) -> Iterator[str]:
    parts = ", ".join(_categories(memory.by_category))
    yield f"peak {size(memory.peak_bytes)} on one rank" + (f": {parts}" if parts else "")
    for run in memory.runs:
        activation = run.by_category.activation
        activations = "" if activation is None else f", activations {size(activation)}"
        yield f"N = {run.accumulation_steps}, B = {run.micro_batch}: peak {size(run.peak_bytes)}{activations}"


def _categories(categories: MemoryByCategory) -> Iterable[str]:
    names = {"parameter": "parameters", "gradient": "gradients", "activation": "activations"}
    for name, amount in categories:
        if amount is not None:
            yield f"{names.get(name, name)} {size(amount)}"


def _not_measured(reason: str | None) -> str:
    return f"not measured: {reason}" if reason else "not measured"
