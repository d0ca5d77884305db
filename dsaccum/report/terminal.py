"""The verify record as people read it: on a terminal in colour, elsewhere as plain text of 80 characters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from rich.text import Text

from dsaccum.report.conclusion import claim_lines, verdict_lines
from dsaccum.report.figures import counted
from dsaccum.report.layout import WIDTH, as_plain_text, labelled, listed, print_lines
from dsaccum.report.resources import communication_lines, memory_lines
from dsaccum.report.step_tables import step_lines
from dsaccum.report.weight_matrix import weight_lines
from dsaccum.verification.records.record import ResumedRecord, VerifyRecord


def print_report(record: VerifyRecord, stream: TextIO | None = None) -> None:
    """Print the whole report, on stdout unless told otherwise.

    Args:
        record: what was found.
        stream: where to; colours are used on a terminal only, and not where ``NO_COLOR`` is set.

    Raises:
        OSError: nobody is left to read it.
    """
    print_lines(lambda width: report_lines(record, width=width), stream)


def report_lines(record: VerifyRecord, *, width: int = WIDTH) -> list[Text]:
    """What was verified, each step, the weights, resources, claims, and last the verdict with its causes."""
    return [
        *_header(record, width),
        *step_lines(record, width=width),
        *weight_lines(record.steps, width=width),
        Text(),
        *communication_lines(record.communication, width=width),
        *memory_lines(record.memory, width=width),
        Text(),
        *claim_lines(record, width=width),
        Text(),
        *verdict_lines(record, width=width),
    ]


def failure_text(record: VerifyRecord) -> str:
    """What a failed assertion says: claims, weights, verdict, causes."""
    return as_plain_text(
        [
            *verdict_lines(record, width=WIDTH),
            Text(),
            *claim_lines(record, width=WIDTH),
            *weight_lines(record.steps, width=WIDTH),
        ]
    )


def _header(record: VerifyRecord, width: int) -> Iterator[Text]:
    yield Text(equation(record))
    for label, text in described(record).items():
        yield from labelled(label, text, width=width)
    yield from listed("fault injected", [record.fault] if record.fault else [], width=width)
    yield from listed("substituted", record.substitutions, width=width)
    yield from listed("remedies", record.remedies, width=width)
    yield from listed("warnings", record.warnings, width=width)


_TRUTHS = {"mixed": "float64, but for what the model itself computes in float32"}


def equation(record: VerifyRecord) -> str:
    """E = W x N x B."""
    batch = record.effective_batch
    return (
        f"effective batch = {counted(batch.world_size, 'rank')} x "
        f"{counted(batch.accumulation_steps, 'accumulation step')} x {batch.micro_batch} micro-batch = "
        f"{counted(batch.total, 'sample')}"
    )


def described(record: VerifyRecord) -> dict[str, str]:
    """What was verified: by label, and nothing where there is nothing to say."""
    model = [record.model.class_name, _parameters(record)]
    numbers = [
        record.precision,
        record.accumulation_dtype and f"gradients accumulated in {record.accumulation_dtype}",
        None if record.zero_stage is None else f"ZeRO stage {record.zero_stage}",
    ]
    took = "" if record.elapsed_s is None else f"{record.elapsed_s:.1f} s"
    said = {
        "model": ", ".join(filter(None, model)),
        "precision": ", ".join(filter(None, numbers)),
        "truth": _TRUTHS.get(record.truth or "", record.truth or ""),
        "loop": record.loop,
        "resumed": "" if record.resumed is None else _resumed(record.resumed),
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
        "took": took,
    }
    return {label: text for label, text in said.items() if text}


def _resumed(resumed: ResumedRecord) -> str:
    before = resumed.split_before
    split = f"{before.world_size} x {before.accumulation_steps} x {before.micro_batch}"
    where = f"{resumed.directory}, {resumed.checkpoint}, {counted(resumed.samples, 'sample')}; before as {split}"
    if resumed.compared is None:
        return where
    kept = ", ".join(["weights", *resumed.states])
    same = (
        "as its files hold them" if not resumed.differing else f"but for {', '.join(resumed.differing)} as in its files"
    )
    return f"{where}\n{kept} of {counted(resumed.compared, 'parameter')}, {same}"


def _parameters(record: VerifyRecord) -> str:
    return "" if record.model.parameters is None else counted(record.model.parameters, "parameter")
