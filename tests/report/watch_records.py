"""Watch records made by hand, with figures like those of real runs."""

from __future__ import annotations

from typing import Any

from dsaccum.verification.records.parts import (
    GradientRecord,
    NormRecord,
    OptimizerSawRecord,
    StepRecord,
    UpdateRecord,
    WeightsRecord,
)
from dsaccum.verification.records.record import Cause, ModelRecord
from dsaccum.verification.records.watch import (
    DividedBy,
    EffectiveBatchAsRun,
    TokenWeightsRecord,
    WatchClaims,
    WatchedRecord,
    WatchRecord,
    WindowRecord,
    worst,
)
from tests.report.records import matrix

DUE = 1 / 8


def window(number: int, factor: float, **changes: Any) -> WindowRecord:
    """N = 4, W = 2; every weight is the due one times the factor."""
    right = factor == 1
    found = matrix(4, 2, DUE * factor)
    claims = {**dict.fromkeys(WatchClaims.model_fields, "pass"), "replicas": "not_applicable"}
    figures: dict[str, Any] = {
        "window": number,
        "verdict": "equivalent" if right else "not_equivalent",
        "claims": WatchClaims(**{**claims, "weighting": "pass" if right else "fail"}),
        "reasons": {"replicas": "not looked at"}
        | ({} if right else {"weighting": f"rank 0: the window's tokens weigh {factor:g} in all, where 1 is due"}),
        "causes": [] if right else [cause()],
        "effective_batch": EffectiveBatchAsRun(
            world_size=2, micro_batch=2, accumulation_steps=4, total=16, targets=240
        ),
        "token_weights": TokenWeightsRecord(
            sum=factor, minimum=factor / 240, maximum=factor / 240, expected=1 / 240, targets=240, on_padding=0,
            uneven_micro_batches=0, remainder=1e-7, tolerance=6e-7, loss="cross-entropy",
            histogram=[(factor * (1 + step * 1e-8), 12) for step in range(20)],
        ),
        "divided_by": DividedBy(script=factor, engine=0.25, ranks=0.5),
        "step": StepRecord(
            step=number,
            applied=True,
            optimizer_steps=[4],
            learning_rate=6e-4,
            micro_batch_weights=WeightsRecord(
                expected=matrix(4, 2, DUE), recovered=found, by_rank=[found, found], max_error=abs(factor - 1),
                tolerance=1e-6, condition=1.3,
            ),
            gradient=GradientRecord(
                error=1.5e-7, bound=6.1e-7, ratio=1.0, residual=2e-8,
                worst_parameter="transformer.h.1.attn.c_attn.weight",
            ),
            optimizer_saw=OptimizerSawRecord(error=5e-8, bound=1.1e-5, ratio=1.0),
            update=UpdateRecord(error=8.5e-5, bound=6e-4, ratio=1.0, worst_parameter="transformer.ln_f.weight"),
            gradient_norm=NormRecord(deepspeed=1.0695, clipped=1.0),
        ),
        "truth": "float64",
        "notes": ["a note of the watch"],
    }  # fmt: skip
    return WindowRecord(**{**figures, **changes})


def cause() -> Cause:
    return Cause(
        id="loss-scaled-twice",
        confidence="certain",
        summary="two layers divide by the number of accumulation steps",
        evidence={"step": 3},
        fix="hand the undivided loss to engine.backward",
    )


def engine(number: int, *windows: WindowRecord, **changes: Any) -> WatchedRecord:
    figures: dict[str, Any] = {
        "number": number,
        "kind": "DeepSpeed",
        "framework": "Trainer",
        "model": ModelRecord(class_name="GPT2LMHeadModel", parameters=28_032),
        "trained_parameters": 28_032,
        "precision": "fp32",
        "accumulation_dtype": "fp32",
        "zero_stage": 1,
        "windows": list(windows),
    }
    return WatchedRecord(**{**figures, **changes})


def record(*engines: WatchedRecord, **changes: Any) -> WatchRecord:
    figures: dict[str, Any] = {
        "verdict": worst([window.verdict for engine in engines for window in engine.windows]),
        "engines": list(engines),
        "messages": ["the watch said this"],
        "versions": {"dsaccum": "0.1.0", "torch": "2.13.0"},
        "hardware": {"device": "cpu", "cores": 2},
        "command": ["python", "-m", "dsaccum.watch", "--", "train.py"],
        "elapsed_s": 3.8,
    }
    return WatchRecord(**{**figures, **changes})


def right() -> WatchRecord:
    return record(engine(1, window(3, 1.0)))


def wrong() -> WatchRecord:
    return record(engine(1, window(3, 0.25)))


def two_windows() -> WatchRecord:
    """Both right."""
    return record(engine(1, window(3, 1.0), window(5, 1.0)))


def two_engines() -> WatchRecord:
    """The second one's windows are wrong."""
    return record(engine(1, window(2, 1.0), window(3, 1.0)), engine(2, window(2, 0.25), window(3, 0.25)))


def nothing_measured() -> WatchRecord:
    bare = WindowRecord(window=3, effective_batch=EffectiveBatchAsRun(world_size=1, accumulation_steps=4, total=8),
                        step=StepRecord(step=3))  # fmt: skip
    return WatchRecord(engines=[WatchedRecord(number=1, kind="bare", windows=[bare])])


def with_text(text: str) -> WatchRecord:
    """It stands wherever a script or a library has a say."""
    bad = Cause(id=text, confidence="certain", summary=text, evidence={text: text}, fix=text)
    seen = window(3, 0.25, causes=[bad], reasons={"weighting": text}, notes=[text], truth=text)
    seen = seen.model_copy(update={"token_weights": seen.token_weights.model_copy(update={"loss": text})})
    owner = engine(1, seen, kind=text, framework=text, model=ModelRecord(class_name=text, parameters=1), precision=text)
    return record(owner, messages=[text], command=[text], versions={text: text}, hardware={text: text})
