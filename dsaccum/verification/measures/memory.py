"""Peak memory of one window, split in several ways: flat in N from 2 on, and one gradient buffer more than at N = 1.

The window's data grow with N wherever a loop holds them, and so do the losses that it keeps; neither is an activation.
The data's size is known and taken off, the losses are allowed for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from dsaccum.data import Samples
from dsaccum.engine.gradients import GradientWitness
from dsaccum.verification.cases.case import Case, OrderRule, WindowChoice
from dsaccum.verification.cases.windows import case_stream
from dsaccum.verification.records.record import ClaimState, MemoryByCategory, MemoryRecord, MemoryRun
from dsaccum.verification.subject.loops import Subject

ACTIVATIONS_KEPT: Final = "activations-kept"
FLAT: Final = 0.01
"""From N to 2 N the peak may grow by this share of the activations."""
LEAST_RISE, MOST_RISE = 0.8, 1.0
"""From N = 1 to more, in gradient buffers, at ZeRO 0 and 1."""
MOST_MICRO_STEPS: Final = 16
"""A window of more is measured with this many: each costs time, and from 2 on they are alike."""
_ALLOCATION_UNIT: Final = 512
"""Bytes; CUDA's allocator rounds every tensor up to a multiple of it."""
_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MemoryPeak:
    """What one window needed at most on one rank, in bytes.

    Attributes:
        accumulation_steps: N.
        micro_batch: B.
        peak_bytes: everything, at the worst moment.
        by_category: parameter, gradient, activation, optimizer, temporary at that moment.
        highest: each category's own worst moment.
        in_forward: by category, the worst moment outside of backward and step.
        allocator_bytes: the same peak as CUDA's allocator counts it; None without a GPU.
        gradient_buffer_bytes: all gradients of the window, whole, in the type that they are accumulated in.
        data_bytes: the window's micro-batches, where they lie on the device; they are part of the activations above.
        kept_bytes: what a loop may keep of each micro-step: a loss or two.
    """

    accumulation_steps: int
    micro_batch: int
    peak_bytes: int
    by_category: dict[str, int]
    highest: dict[str, int]
    in_forward: dict[str, int]
    allocator_bytes: int | None
    gradient_buffer_bytes: int
    data_bytes: int
    kept_bytes: int

    @property
    def activation_bytes(self) -> int:
        """The activations' own peak, without the window's data."""
        return self.highest["activation"] - self.data_bytes

    @property
    def levels(self) -> dict[str, int]:
        """The three quantities that must not grow with N, without the window's data."""
        return {
            "activation": self.activation_bytes,
            "peak": self.peak_bytes - self.data_bytes,
            "forward": sum(self.in_forward.values()) - self.data_bytes,
        }


def memory_cases(case: Case) -> list[Case]:
    """The case's batch as one big micro-batch, in N, and twice the batch in 2 N; with N = 1, in one and in two.

    All rows have the same length: rows of text would differ in size from one split to the next. N is at most
    ``MOST_MICRO_STEPS``.
    """
    steps, rows = min(case.batch.accumulation_steps, MOST_MICRO_STEPS), case.batch.micro_batch
    splits = [(1, rows), (2, rows)] if steps == 1 else [(1, steps * rows), (steps, rows), (2 * steps, rows)]
    return [with_equal_rows(case.split(*split)) for split in splits]


def with_equal_rows(case: Case) -> Case:
    """The case with one window, all of whose rows are as long as rows can be."""
    samples = _equal_rows(case.samples, case.batch.total)
    return replace(
        case,
        samples=samples,
        probe_samples=samples,
        order=OrderRule(len(samples), "continue", case.order.seed),
        windows=(WindowChoice(0, probe=False),),
    )


def _equal_rows(samples: Samples, count: int) -> Samples:
    """The same tokens in every row. Padded ones end a token early: a mask without padding is a path of its own."""
    filled = samples.sequence_length - (samples.padded and samples.sequence_length > 2)
    return replace(
        samples,
        tokens=np.resize(samples.tokens, filled),
        starts=np.zeros(count, np.int64),
        lengths=np.full(count, filled),
        prompt_lengths=np.zeros(count, np.int64),
    )


def measure_peak(subject: Subject, case: Case, run_window: Callable[[], object]) -> MemoryPeak:
    """The peak of one window, once the optimizer's states exist.

    Args:
        subject: the engine under test, new.
        case: what it runs.
        run_window: makes the loop under test run one window of the case.
    """
    engine = subject.engine
    if not _make_states(subject, case):
        run_window()
    witness = GradientWitness(engine.module)
    from dsaccum.instruments.memory import measure_memory  # MemTracker brings inductor and DTensor with it: a second

    use, unused = measure_memory(engine, [run_window]), witness.close()
    on_gpu = torch.device(engine.device).type == "cuda"
    return MemoryPeak(
        accumulation_steps=case.batch.accumulation_steps,
        micro_batch=case.batch.micro_batch,
        peak_bytes=use.peak_bytes,
        by_category=use.by_category,
        highest=use.highest,
        in_forward=use.in_forward,
        allocator_bytes=use.allocator_bytes,
        gradient_buffer_bytes=_gradient_buffer(engine, unused, _DTYPES[case.accumulation_dtype], on_gpu=on_gpu),
        data_bytes=0 if on_gpu else _data_bytes(case, subject.ranks.rank),
        kept_bytes=2 * _ALLOCATION_UNIT if on_gpu else 64,
    )


def _make_states(subject: Subject, case: Case) -> bool:
    """Let the optimizer make its states in a window of one short row each, which changes nothing but weights.

    Returns:
        Whether it has states now. A model that wants other inputs, or returns no logits, leaves that to a whole window.
    """
    engine = subject.engine
    tokens = torch.full((1, 2), case.vocabulary.end_token, device=engine.device)
    inputs = {"input_ids": tokens, **({"attention_mask": torch.ones_like(tokens)} if case.samples.padded else {})}
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError, KeyError, IndexError):
        for _ in range(subject.accumulation_steps):
            engine.backward(engine(**inputs).logits.float().sum() * 0)
            engine.step()
    base = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return any(isinstance(value, torch.Tensor) for state in base.state.values() for value in state.values())


def _gradient_buffer(engine: Any, unused: Sequence[str], dtype: torch.dtype, *, on_gpu: bool) -> int:
    sizes = [
        int(getattr(parameter, "ds_numel", parameter.numel())) * dtype.itemsize
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad and name not in unused
    ]
    unit = _ALLOCATION_UNIT if on_gpu else 1
    return sum(-(-size // unit) * unit for size in sizes)


def _data_bytes(case: Case, rank: int) -> int:
    window = case_stream(case, rank).window(0)
    return sum(field.nbytes for micro_batch in window for field in micro_batch.values())


def judge_memory(
    peaks: Sequence[Sequence[MemoryPeak]], case: Case
) -> tuple[MemoryRecord, ClaimState, str, dict[str, Any] | None]:
    """Does memory stay as it is when N doubles, and is accumulation's own share one gradient buffer?

    Args:
        peaks: by case, as ``memory_cases`` made them, and by rank.
        case: what was verified.

    Returns:
        What goes into the record (of the rank that needed most), the state of the claim, the reason for it, and the
        finding ``activations-kept`` with its evidence where the activations are what grows.
    """
    ranks = [_Splits(of_rank, case) for of_rank in zip(*peaks, strict=True)]
    if not ranks:
        reason = "no window was measured"
        return MemoryRecord(reason=reason), "untested", reason, None
    for rank, splits in enumerate(ranks):
        if (problem := splits.problem()) is not None:
            reason = f"rank {rank}: {problem}"
            return _record(peaks, splits, reason), "fail", reason, splits.finding()
    reason = ranks[0].what_holds()
    return _record(peaks, ranks[0], reason), "pass", reason, None


class _Splits:
    """One rank's peaks, compared.

    Attributes:
        one: N = 1, with all rows of the window in one micro-batch.
        fewer: the case's own B, and its N.
        more: the same B, and twice as many.
    """

    def __init__(self, peaks: Sequence[MemoryPeak], case: Case) -> None:
        own = sorted((p for p in peaks if p.micro_batch == case.batch.micro_batch), key=lambda p: p.accumulation_steps)
        self.fewer, self.more = own
        self.one = next(peak for peak in peaks if peak.accumulation_steps == 1)
        self._case = case

    @property
    def rise(self) -> float:
        """Gradients that stand in forward, in gradient buffers: with several micro-batches less those with one."""
        several = self.more if self.fewer is self.one else self.fewer
        rise = several.in_forward["gradient"] - self.one.in_forward["gradient"]
        return rise / max(several.gradient_buffer_bytes, 1)

    def problem(self) -> str | None:
        """What grows that should not, or does not stand where it should; None where all is well."""
        fewer, more = self.fewer, self.more
        for name, grown in self._growth().items():
            if grown > self._allowed(name):
                before, after = (_size(peak.levels[name]) for peak in (fewer, more))
                steps = more.accumulation_steps - fewer.accumulation_steps
                return (
                    f"{_WORDS[name]} {before} with N = {fewer.accumulation_steps} and {after} with "
                    f"N = {more.accumulation_steps}: {_size(grown // steps)} more at each micro-step, "
                    f"{grown / steps / self._one_micro_batch():.2f} of a micro-batch's activations"
                )
        if self._case.zero_stage > 1 or self._stands_always() or LEAST_RISE <= round(self.rise, 2) <= MOST_RISE:
            return None
        return f"accumulation adds {self.rise:.2f} gradient buffers, one is due at ZeRO {self._case.zero_stage}"

    def finding(self) -> dict[str, Any] | None:
        """Evidence that activations are kept; None where something else is wrong."""
        grown = self._growth()["activation"]
        if grown <= self._allowed("activation"):
            return None
        per_step = grown / (self.more.accumulation_steps - self.fewer.accumulation_steps)
        return {
            "id": ACTIVATIONS_KEPT,
            "bytes_per_micro_step": round(per_step),
            "micro_batches_per_micro_step": per_step / self._one_micro_batch(),
            "accumulation_steps": [self.fewer.accumulation_steps, self.more.accumulation_steps],
            "activation_bytes": [self.fewer.activation_bytes, self.more.activation_bytes],
        }

    def what_holds(self) -> str:
        """The claim in figures."""
        fewer, more = self.fewer, self.more
        share = fewer.activation_bytes / self.one.activation_bytes
        of_one = "" if fewer is self.one else f", {share:.2f} of one big batch's"
        capped = fewer.accumulation_steps < self._case.batch.accumulation_steps
        measured = f" (N = {self._case.batch.accumulation_steps} was not measured)" if capped else ""
        stand = "stand at N = 1 too" if self._stands_always() else f"are {self.rise:.2f} gradient buffers more"
        return (
            f"activations peak at {_size(fewer.activation_bytes)} with N = {fewer.accumulation_steps} and at "
            f"{_size(more.activation_bytes)} with N = {more.accumulation_steps}{measured}{of_one}; "
            f"accumulated gradients {stand}"
        )

    def _growth(self) -> dict[str, int]:
        """Bytes by level. From N = 1 to 2 a gradient buffer comes in, so that only activations can be compared."""
        names = ("activation",) if self.fewer is self.one else tuple(_WORDS)
        return {name: self.more.levels[name] - self.fewer.levels[name] for name in names}

    def _allowed(self, name: str) -> float:
        steps = self.more.accumulation_steps - self.fewer.accumulation_steps
        allowed = FLAT * self.fewer.activation_bytes + steps * self.more.kept_bytes
        return allowed if name == "activation" else allowed + self._exchange_buffer()

    def _exchange_buffer(self) -> int:
        """What ZeRO exchanges at once. When it is freed depends on when the other ranks are done with it.

        So a peak may hold one more of them in one run than in another, and of more micro-steps one more often is so.
        """
        if self._case.batch.world_size == 1 or self._case.zero_stage == 0:
            return 0
        bucket = self._case.config["zero_optimization"].get("reduce_bucket_size", self.more.gradient_buffer_bytes)
        return min(int(bucket) * _DTYPES[self._case.accumulation_dtype].itemsize, self.more.gradient_buffer_bytes)

    def _one_micro_batch(self) -> float:
        return self.one.activation_bytes * self.fewer.micro_batch / self.one.micro_batch

    def _stands_always(self) -> bool:
        """Some wrappers never free their gradient buffer; ZeRO 3 keeps what it has reduced."""
        return self.one.in_forward["gradient"] > (1 - LEAST_RISE) * self.one.gradient_buffer_bytes


_WORDS: Final = {"activation": "activations peak at", "peak": "memory peaks at", "forward": "forward peaks at"}


def _size(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


def _record(peaks: Sequence[Sequence[MemoryPeak]], splits: _Splits, reason: str) -> MemoryRecord:
    runs = [
        MemoryRun(
            accumulation_steps=peak.accumulation_steps,
            micro_batch=peak.micro_batch,
            peak_bytes=peak.peak_bytes,
            by_category=MemoryByCategory(**peak.by_category),
        )
        for peak in (max(of_case, key=lambda peak: peak.peak_bytes) for of_case in peaks)
    ]
    wanted = splits.fewer.accumulation_steps, splits.fewer.micro_batch
    own = next(run for run in runs if (run.accumulation_steps, run.micro_batch) == wanted)
    return MemoryRecord(peak_bytes=own.peak_bytes, by_category=own.by_category, runs=runs, reason=reason)
