"""The watch record as people read it: of each window what ran, who divided, the weights, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from rich.text import Text

from dsaccum.report.figures import counted, error_and_bound, is_or_are, plain, ratio, scientific
from dsaccum.report.layout import RIGHT, WIDTH, WRONG, as_plain_text, labelled, listed, print_lines
from dsaccum.report.resources import communication_lines, window_memory_lines
from dsaccum.report.weight_matrix import weight_lines
from dsaccum.verification.diagnosis.causes import UNKNOWN
from dsaccum.verification.records.record import Cause
from dsaccum.verification.records.watch import EffectiveBatchAsRun, WatchedRecord, WatchRecord, WindowRecord


def print_watch(record: WatchRecord, stream: TextIO | None = None, *, several: bool = False) -> None:
    """Print all windows of all engines.

    Args:
        record: with them.
        stream: where to, stdout if left out.
        several: there are other engines, which are not in this record.

    Raises:
        OSError: nobody is left to read it.
    """
    print_lines(lambda width: watch_lines(record, several=several, width=width), stream)


def watch_lines(record: WatchRecord, *, several: bool = False, width: int = WIDTH) -> list[Text]:
    """Everything."""
    lines: list[Text] = []
    several = several or len(record.engines) > 1
    for engine in record.engines:
        for window in engine.windows:
            lines += window_lines(engine, window, several=several, width=width)
    return lines


def overall(record: WatchRecord) -> str:
    """The verdict over all windows of all engines, in one sentence."""
    windows = [window for engine in record.engines for window in engine.windows]
    if len(windows) == 1:
        return verdict_text(windows[0])
    if not windows:
        return "NONE: no window was looked at"
    if record.verdict == "equivalent":
        return f"RIGHT: each of {len(windows)} windows gave the update of one batch"
    if record.verdict is None:
        return "NONE: nothing that was looked at is wrong, but not all could be told"
    wrong = sum(window.verdict == "not_equivalent" for window in windows)
    return f"WRONG: {wrong} of {len(windows)} windows did not give the update of one batch"


def distinct_causes(record: WatchRecord) -> list[Cause]:
    """Of all windows, each once."""
    causes = [cause for engine in record.engines for window in engine.windows for cause in window.causes]
    return list({(cause.id, cause.summary, cause.fix): cause for cause in reversed(causes)}.values())[::-1]


def failure_text(record: WatchRecord) -> str:
    """What a failed assertion says: of each window that is not proven right, verdict, causes, claims and weights."""
    lines = [Text(overall(record)), *map(Text, record.messages)]
    several = len(record.engines) > 1
    for engine in record.engines:
        for window in engine.windows:
            if window.verdict != "equivalent":
                lines += [
                    *_title(engine, window, several=several),
                    *_verdict(window, WIDTH),
                    *_claims(window, WIDTH),
                    *_factors(window, WIDTH),
                    *weight_lines([window.step], width=WIDTH, remark=relative_to(window)),
                    *_tokens(window, WIDTH),
                ]
    return as_plain_text(lines)


def window_lines(engine: WatchedRecord, window: WindowRecord, *, several: bool, width: int) -> list[Text]:
    """One window."""
    return [
        *_title(engine, window, several=several),
        *_header(engine, window, width),
        *_factors(window, width),
        *weight_lines([window.step], width=width, remark=relative_to(window)),
        *_tokens(window, width),
        *_step(window, width),
        *_communication(engine, window, width),
        *window_memory_lines(window.memory, width=width),
        Text(),
        *_claims(window, width),
        *_verdict(window, width),
    ]


def _title(engine: WatchedRecord, window: WindowRecord, *, several: bool) -> list[Text]:
    whose = ", ".join(filter(None, [f" of engine {engine.number}", engine.model.class_name])) if several else ""
    return [Text(), Text(f"dsaccum.watch: window {window.window}{whose}")]


def relative_to(window: WindowRecord) -> str:
    """What the weights leave open where no tokens could be read; empty where nothing."""
    if window.token_weights.sum is not None or window.step.micro_batch_weights.recovered is None:
        return ""
    return "relative to what arrived at the losses: whether they were divided by N isn't seen"


_TRUTHS = {
    "float32": "in float32: the model does not run in float64",
    "own precision": "in the run's own precision: the model runs in no other",
}


def described(engine: WatchedRecord, window: WindowRecord) -> dict[str, str]:
    """What ran: by label, and nothing where there is nothing to say."""
    batch, kind = window.effective_batch, engine.kind.replace("bare", "plain PyTorch")
    driver = f"{engine.framework} with {kind}" if engine.framework else kind
    stage = f"ZeRO stage {engine.zero_stage}" if engine.zero_stage is not None else None
    said = {
        "as run": _as_run(batch),
        "config": _as_configured(batch),
        "model": ", ".join(filter(None, [engine.model.class_name, _parameters(engine)])),
        "run by": ", ".join(filter(None, [driver, engine.precision, stage])),
        "truth": _TRUTHS.get(window.truth or "", window.truth) if window.truth not in (None, "float64") else None,
    }
    return {label: text for label, text in said.items() if text}


def _as_run(batch: EffectiveBatchAsRun) -> str:
    rows = f"{batch.micro_batch} rows" if batch.micro_batch is not None else "rows"
    return (
        f"{counted(batch.world_size, 'rank')} x {counted(batch.accumulation_steps, 'micro-step')} x {rows} = "
        f"{counted(batch.total, 'row')}" + (f", {counted(batch.targets, 'target token')}" if batch.targets else "")
    )


def _as_configured(batch: EffectiveBatchAsRun) -> str | None:
    """What the config says of it, where that is something else."""
    asked = (batch.configured_accumulation_steps, batch.configured_micro_batch)
    if asked[0] is None or asked == (batch.accumulation_steps, batch.micro_batch):
        return None
    return counted(asked[0], "micro-step") + (f" x {asked[1]} rows" if asked[1] else "")


def _parameters(engine: WatchedRecord) -> str:
    parameters = counted(engine.model.parameters or 0, "parameter")
    if engine.trained_parameters == engine.model.parameters:
        return parameters
    return f"{parameters}, {engine.trained_parameters or 0:,} of them trained"


def _header(engine: WatchedRecord, window: WindowRecord, width: int) -> Iterator[Text]:
    for label, text in described(engine, window).items():
        yield from labelled(label, text, width=width)
    yield from listed("note", window.notes, width=width)


def _factors(window: WindowRecord, width: int) -> Iterator[Text]:
    divided = window.divided_by
    script = ratio(divided.script) if divided.script is not None else "not seen"
    text = f"script {script}, engine {ratio(divided.engine)}, accumulation and ranks {ratio(divided.ranks)}"
    if divided.after_backward is not None:
        text += f", after backward {ratio(divided.after_backward)}"
    yield from labelled("factors", text, width=width)


def _tokens(window: WindowRecord, width: int) -> Iterator[Text]:
    tokens = window.token_weights
    if tokens.sum is None:
        yield from labelled("tokens", f"not told: {tokens.reason}", width=width)
        return
    expected = tokens.expected or 1.0
    smallest, largest = ((weight or 0.0) / expected for weight in (tokens.minimum, tokens.maximum))
    spread = f"each {ratio(smallest)} to {ratio(largest)} of what is due"
    yield from labelled("tokens", f"their weights add up to {plain(tokens.sum, 6)} (due 1); {spread}", width=width)


def _step(window: WindowRecord, width: int) -> Iterator[Text]:
    step = window.step
    yield from labelled(
        "gradient", f"error {error_and_bound(step.gradient.error, step.gradient.bound)}, residual "
        f"{scientific(step.gradient.residual)}, norm {plain(step.gradient_norm.deepspeed, 4)}, clipped to "
        f"{plain(step.gradient_norm.clipped, 4)}",
        width=width,
    )  # fmt: skip
    if step.update.error is not None:
        update = (
            f"error {error_and_bound(step.update.error, step.update.bound)}, ratio {ratio(step.update.ratio)}, rate "
        )
        yield from labelled("update", update + scientific(step.learning_rate), width=width)


def _communication(engine: WatchedRecord, window: WindowRecord, width: int) -> list[Text]:
    alone = engine.kind == "bare"
    return [] if alone else communication_lines(window.communication, width=width)


def _claims(window: WindowRecord, width: int) -> Iterator[Text]:
    passed = window.claims.which("pass")
    yield from listed("passed", [", ".join(passed)] if passed else [], width=width)
    yield from listed("failed", _reasons(window, "fail"), width=width, style=WRONG)
    yield from listed("not tested", _reasons(window, "untested"), width=width)
    yield from listed("not applicable", _reasons(window, "not_applicable"), width=width)


def _reasons(window: WindowRecord, state: str) -> list[str]:
    names = window.claims.which(state)  # type: ignore[arg-type]
    return [f"{name}: {window.reasons[name]}" if name in window.reasons else name for name in names]


def verdict_text(window: WindowRecord) -> str:
    """In one sentence."""
    batch = window.effective_batch
    split = f"{counted(batch.accumulation_steps, 'micro-batch', 'es')} on {counted(batch.world_size, 'rank')}"
    if window.verdict == "equivalent":
        return f"RIGHT: {split} gave the update of one batch of {batch.total} rows"
    if window.verdict == "not_equivalent":
        wrong = ", ".join(window.claims.which("fail"))
        split = f"{split} {is_or_are(batch.accumulation_steps)}"
        return f"WRONG: {split} not one batch of {batch.total} rows; wrong: {wrong}"
    return "NONE: nothing that was looked at is wrong, but not all could be told"


def _verdict(window: WindowRecord, width: int) -> Iterator[Text]:
    style = {"equivalent": RIGHT, "not_equivalent": WRONG}.get(window.verdict or "", "")
    yield from labelled("verdict", verdict_text(window), width=width, style=style)
    for number, cause in enumerate(window.causes, start=1):
        yield from _cause(cause, number, len(window.causes), width)


def _cause(cause: Cause, number: int, causes: int, width: int) -> Iterator[Text]:
    label = "cause" if causes == 1 else f"cause {number} of {causes}"
    named = cause.id if cause.id == UNKNOWN else f"{cause.id} ({cause.confidence})"
    yield from labelled(label, named, width=width, style=WRONG)
    yield from labelled("", cause.summary, width=width)
    yield from labelled("fix", cause.fix, width=width)
