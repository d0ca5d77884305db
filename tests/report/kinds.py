"""One small record of each further kind, good and bad: what a page of it is made from."""

from __future__ import annotations

from typing import Any

from dsaccum.bench.record import BenchRecord, WorkloadRecord
from dsaccum.planning.record import (
    BatchRecord,
    ModelRecord,
    PhaseRecord,
    PlanRecord,
    PriceRecord,
    SplitRecord,
    WayRecord,
)
from dsaccum.records import Record
from dsaccum.report.other_record import OtherRecord
from dsaccum.report.train_run import TrainRecord, TrainStep
from tests.audit.records import cell as audit_cell
from tests.audit.records import own
from tests.audit.records import record as audit_record
from tests.bench.records import candidate, failed
from tests.power.records import cell as fault_cell
from tests.power.records import record as faults_record
from tests.power.records import setting


def faults(*, sound: bool) -> Record:
    cells = [fault_cell("loss-scaled-twice", usual_check="missed"), fault_cell("mean-of-means", "ambiguous", 1)]
    if not sound:
        cells += [fault_cell("padding-counted", "missed", 2), fault_cell("stale-gradients", "misnamed", 3)]
        cells += [fault_cell("ranks-summed", "unnamed", 1, detail="nobody knows it")]
    reason = {"fault": "loss-scale-not-applied", "reason": "fp32 has no loss scale", "settings": [setting()]}
    return faults_record(*cells, not_applicable=[reason], versions={"torch": "2.13.0"}, elapsed_s=3.0)


def audit(*, good: bool) -> Record:
    cells = [audit_cell("own-loss"), audit_cell("two", "costly", 1)]
    if not good:
        cells += [audit_cell("flag", "wrong", 0, "loss-scaled-twice"), audit_cell("flag", "right", 1)]
        cells += [audit_cell("sync", "refused", 2, detail="AssertionError: no_sync is incompatible")]
        cells += [audit_cell("sync", "untested", 0, detail="rank 1 hangs", precision="bf16")]
    return audit_record(*cells, ways={"own-loss": "the loss of the model"}, versions={"deepspeed": "0.19.8"})


def own_audit() -> Record:
    return audit_record(own=own(False, audit_cell("flag", "wrong", 1, "loss-scaled-twice")))


def bench(word: str | None = "accept", **changes: Any) -> BenchRecord:
    work = WorkloadRecord(
        model="GPT2LMHeadModel", parameters=1_000_000, sequence_length=64, precision="fp32", zero_stage=1, rounds=2,
        windows=3, warm_up_windows=1,
    )  # fmt: skip
    wrong = candidate(4, activation=5, verdict="not_equivalent", causes=("loss-scaled-twice",))
    splits = [candidate(1, activation=40), candidate(2, activation=20, gradient=5, seconds=1.2), wrong, failed(8)]
    figures = {
        "word": word, "reason": "N = 2: the same update with 15.0 MiB less memory", "advice": ['"bf16" halves them'],
        "world_size": 1, "total": 16, "configured_accumulation_steps": 2, "candidates": splits, "workload": work,
    }  # fmt: skip
    return BenchRecord(**{**figures, **changes})


def train(status: str = "finished", steps: int = 12, **changes: Any) -> TrainRecord:
    """The fifth step was skipped; every fourth has a held-out loss."""
    lines = [
        TrainStep(
            step=number, tokens=1000 * number, loss=None if number == 5 else 6 / number, learning_rate=3e-4,
            gradient_norm=None if number == 5 else 1.5, seconds=0.5, applied=number != 5,
            held_out_loss=6.1 / number if number % 4 == 0 else None,
        )
        for number in range(1, steps + 1)
    ]  # fmt: skip
    figures: dict[str, Any] = {
        "status": status, "name": "stdlib-nano", "held_out_loss": 0.51, "tokens_per_second": 1903.2,
        "effective_batch": {"world_size": 2, "micro_batch": 2, "accumulation_steps": 4, "total": 16},
        "parameters": {"total": 15600, "trained": 15600}, "deepspeed": {"optimizer": {"type": "AdamW"}},
        "experiment": {"name": "stdlib-nano"}, "data": {"source": "python-stdlib"}, "versions": {"torch": "2.13.0"},
        "command": ["--deepspeed", "ds.json"], "steps": lines,
    }  # fmt: skip
    return TrainRecord(**{**figures, **changes})


def split(micro_batch: int, samples: int = 8) -> SplitRecord:
    """12 GiB that are always there, and 3 for each sample; backward is the highest."""
    gib = 2**30
    fixed = {"parameters": 4 * gib, "gradients": 4 * gib, "optimizer": 4 * gib}
    growing = {"activations": 2 * gib * micro_batch, "logits": gib * micro_batch, "data": 16 * micro_batch}
    forward = growing | {"logits": gib * micro_batch // 2}
    parts = {"forward": fixed | forward, "backward": fixed | growing, "step": fixed | {"data": 16 * micro_batch}}
    phases = {name: PhaseRecord(peak_bytes=sum(each.values()), by_category=each) for name, each in parts.items()}
    return SplitRecord(
        micro_batch=micro_batch,
        accumulation_steps=samples // micro_batch,
        peak_bytes=phases["backward"].peak_bytes,
        phase="backward",
        phases=phases,
    )


def way(memory: int, *, stage: int = 0, checkpointing: bool = False, **changes: Any) -> WayRecord:
    splits = [split(micro_batch) for micro_batch in (8, 4, 2, 1)]
    best = next((each for each in splits if each.peak_bytes <= memory), None)
    return WayRecord(
        zero_stage=stage, precision="fp32", accumulation_dtype="fp32", activation_checkpointing=checkpointing,
        reduce_bucket_bytes=0, fits=best is not None, best=best, splits=splits,
        short_bytes=max(0, splits[-1].peak_bytes - memory),
        price=PriceRecord(compute=1.25 if checkpointing else 1.0, gradient_bytes=2**32, parameter_bytes=2**32 * stage),
        **changes,
    )  # fmt: skip


def plan(*, memory: int = 25 * 2**30, other_memory: int | None = None, **changes: Any) -> PlanRecord:
    """Of one GPU; ``other_memory`` is what ZeRO 3 with checkpointing behaves as if it had."""
    asked = way(memory)
    other = way(other_memory or memory, stage=3, checkpointing=True, changes=['"zero_optimization": {"stage": 3}'])
    batch = asked.best and BatchRecord(
        world_size=2,
        micro_batch=asked.best.micro_batch,
        accumulation_steps=asked.best.accumulation_steps,
        total=2 * asked.best.micro_batch * asked.best.accumulation_steps,
    )
    figures: dict[str, Any] = {
        "fits": asked.fits, "experiment": "gpt2.yaml", "deepspeed": "ds.json", "device": "cuda",
        "memory_bytes": memory, "effective_batch": batch, "asked": asked, "chosen": asked if asked.fits else None,
        "model": ModelRecord(class_name="GPT2LMHeadModel", parameters=10**9, trained=10**9, logits_bytes_per_sample=99),
        "others": [way(memory, stage=1, changes=['"zero_optimization": {"stage": 1}']), other],
        "advice": ["a smaller reduce bucket"], "written": "out.json" if asked.fits else None,
        "versions": {"torch": "2.13.0"}, "command": ["dsaccum", "plan"],
    }  # fmt: skip
    return PlanRecord(**{**figures, **changes})


def other() -> Record:
    findings = [{"name": "compiler", "found": "none", "state": "problem", "fix": None}]
    return OtherRecord(
        schema="dsaccum.doctor/1",
        verdict="problem",
        findings=findings,
        ranks=2,
        memory={"free": 3},
        versions={"ninja": None},
    )
