"""Candidates with the figures that a test is about."""

from __future__ import annotations

from dsaccum.bench.record import BenchMemory, BenchTime, BenchUpdate, CandidateRecord
from dsaccum.verification.records.parts import MemoryByCategory

MIB = 2**20


def candidate(
    steps: int, *, activation: int, gradient: int = 0, temporary: int = 0, parameter: int = 10, optimizer: int = 20,
    seconds: float = 1.0, verdict: str | None = "equivalent", causes: tuple[str, ...] = (),
) -> CandidateRecord:  # fmt: skip
    """Sizes in MiB."""
    parts = {
        "parameter": parameter, "optimizer": optimizer, "gradient": gradient, "activation": activation,
        "temporary": temporary,
    }  # fmt: skip
    peak = sum(parts.values())
    return CandidateRecord(
        accumulation_steps=steps,
        micro_batch=16 // steps,
        memory=BenchMemory(
            peak_bytes=peak * MIB,
            added_bytes=(peak - parameter - optimizer) * MIB,
            by_category=MemoryByCategory(**{name: size * MIB for name, size in parts.items()}),
            gradient_buffer_bytes=parameter * MIB,
        ),
        time=BenchTime(seconds=[seconds] * 3, median_s=seconds, p95_s=seconds, tokens_per_s=1000 / seconds),
        update=BenchUpdate(verdict=verdict, causes=list(causes)),
        loss=5.0,
    )


def failed(steps: int) -> CandidateRecord:
    return CandidateRecord(accumulation_steps=steps, micro_batch=16 // steps, failure="rank 1 was killed (signal 9)")
