"""Records made by hand, with figures like those of real runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsaccum.verification.records.record import (
    Cause,
    Claims,
    CommunicationRecord,
    EffectiveBatchRecord,
    GradientRecord,
    LossRecord,
    Matrix,
    MemoryByCategory,
    MemoryRecord,
    MemoryRun,
    MicroStepRecord,
    ModelRecord,
    NormRecord,
    OptimizerSawRecord,
    StepRecord,
    TensorOff,
    TrajectoryRecord,
    UpdateRecord,
    VerifyRecord,
    WeightsRecord,
    verdict_of,
)

MIB = 2**20


def matrix(accumulation_steps: int, ranks: int, weight: float) -> Matrix:
    return [[weight] * ranks for _ in range(accumulation_steps)]


def weights(
    accumulation_steps: int, ranks: int, recovered: Matrix | None = None, by_rank: Sequence[Matrix] | None = None
) -> WeightsRecord:
    due = 1 / (accumulation_steps * ranks)
    recovered = recovered or matrix(accumulation_steps, ranks, due * (1 + 3e-8))
    error = max(abs(cell / due - 1) for row in recovered for cell in row if cell is not None)
    return WeightsRecord(
        expected=matrix(accumulation_steps, ranks, due),
        recovered=recovered,
        by_rank=[recovered] * ranks if by_rank is None else list(by_rank),
        max_error=error,
        tolerance=1e-6,
        condition=2.1,
    )


def step(number: int, accumulation_steps: int, ranks: int, **changes: Any) -> StepRecord:
    figures: dict[str, Any] = {
        "step": number,
        "window": number - 1,
        "data": "probe" if number == 1 else "text",
        "applied": True,
        "optimizer_steps": [accumulation_steps],
        "learning_rate": 3e-4 * number,
        "loss": LossRecord(deepspeed=5.8470912, big_batch=5.8470911, truth=5.84709113),
        "micro_batch_weights": weights(accumulation_steps, ranks),
        "gradient": GradientRecord(
            error=2.1e-7, bound=1.3e-6, ratio=1.0, residual=1.9e-7, yardstick_error=3e-7, noise=0.0,
            worst_parameter="gpt_neox.layers.3.attention.dense.weight",
        ),
        "optimizer_saw": OptimizerSawRecord(error=3.4e-7, bound=2.6e-6, ratio=0.9999999),
        "update": UpdateRecord(error=8.8e-8, bound=4.2e-7, ratio=1.0000001, worst_parameter="gpt_neox.embed_in.weight"),
        "gradient_norm": NormRecord(deepspeed=8.6001, big_batch=8.6001, clipped=1.0),
    }  # fmt: skip
    return StepRecord(**{**figures, **changes})


def communication(accumulation_steps: int) -> CommunicationRecord:
    gradient_bytes = 4 * 1_853_568
    quiet = [MicroStepRecord(micro_step=number, operations={}, gradient_bytes=0, parameter_bytes=0, control_bytes=0)
             for number in range(1, accumulation_steps)]  # fmt: skip
    boundary = MicroStepRecord(
        micro_step=accumulation_steps, operations={"all_reduce": 3}, gradient_bytes=gradient_bytes, parameter_bytes=0,
        control_bytes=12,
    )  # fmt: skip
    return CommunicationRecord(
        per_micro_step=[*quiet, boundary],
        expected_gradient_bytes=gradient_bytes,
        only_at_boundary=True,
        witnesses={"dispatch": gradient_bytes, "comms_logger": gradient_bytes},
    )


def memory(accumulation_steps: int, micro_batch: int) -> MemoryRecord:
    def by_category(activation: float) -> MemoryByCategory:
        return MemoryByCategory(
            parameter=7 * MIB,
            gradient=7 * MIB,
            activation=int(activation * MIB),
            optimizer=14 * MIB,
            temporary=MIB // 2,
        )

    def run(steps: int, rows: int) -> MemoryRun:
        return MemoryRun(
            accumulation_steps=steps,
            micro_batch=rows,
            peak_bytes=int((28.5 + 6.3 * rows) * MIB),
            by_category=by_category(6.3 * rows),
        )

    return MemoryRecord(
        peak_bytes=int((28.5 + 6.3 * micro_batch) * MIB),
        by_category=by_category(6.3 * micro_batch),
        runs=[run(1, accumulation_steps * micro_batch), run(accumulation_steps, micro_batch),
              run(2 * accumulation_steps, micro_batch)],
    )  # fmt: skip


def record(accumulation_steps: int = 4, ranks: int = 2, micro_batch: int = 2, **changes: Any) -> VerifyRecord:
    """An equivalent one, but for the changes; the verdict follows from its claims."""
    figures: dict[str, Any] = {
        "loop": "dsaccum",
        "claims": Claims(**dict.fromkeys(Claims.model_fields, "pass")),
        "effective_batch": EffectiveBatchRecord(
            world_size=ranks,
            micro_batch=micro_batch,
            accumulation_steps=accumulation_steps,
            total=ranks * micro_batch * accumulation_steps,
        ),
        "model": ModelRecord(class_name="GPTNeoXForCausalLM", parameters=1_853_568),
        "precision": "fp32",
        "accumulation_dtype": "fp32",
        "zero_stage": 0,
        "truth": "float64",
        "steps": [step(number, accumulation_steps, ranks) for number in (1, 2, 3)],
        "trajectory": TrajectoryRecord(max=1.2e-8, mean_drift=4e-9, bound=3e-7),
        "communication": communication(accumulation_steps),
        "memory": memory(accumulation_steps, micro_batch),
        "experiment": {"name": "stdlib-nano"},
        "deepspeed_config": {"gradient_accumulation_steps": accumulation_steps},
        "versions": {"dsaccum": "0.1.0", "torch": "2.13.0+cpu", "deepspeed": "0.19.8", "transformers": "5.24.0",
                     "python": "3.11.7"},
        "hardware": {"device": "cpu", "cores": 2},
        "command": ["dsaccum", "verify", "--deepspeed", "ds_configs/accum4.json"],
        "elapsed_s": 21.4,
    }  # fmt: skip
    figures = {**figures, **changes}
    return VerifyRecord(verdict=verdict_of(figures["claims"]), **figures)


def loss_scaled_twice() -> VerifyRecord:
    """N = 4, W = 2: the gradient is a quarter of the right one, and clipping does not hide it."""
    wrong_step = {
        "micro_batch_weights": weights(4, 2, matrix(4, 2, 1 / 32)),
        "gradient": GradientRecord(
            error=0.75, bound=1.3e-6, ratio=0.25, residual=1.9e-7, yardstick_error=3e-7, noise=0.0,
            worst_parameter="gpt_neox.embed_in.weight",
        ),
        "optimizer_saw": OptimizerSawRecord(error=0.75, bound=2.6e-6, ratio=0.25),
        "gradient_norm": NormRecord(deepspeed=0.71, big_batch=2.84, clipped=0.71),
    }  # fmt: skip
    claims = {**dict.fromkeys(Claims.model_fields, "pass"), "gradient": "fail", "memory": "untested"}
    return record(
        loop="hf-labels",
        fault="loss-scaled-twice",
        claims=Claims(**{**claims, "clipping": "not_applicable"}),
        reasons={
            "gradient": "every micro-batch entered with a quarter of its weight in steps 1 to 3",
            "clipping": "the JSON sets no limit",
            "memory": "the measurement was not stable: two runs of the same differ by 4 %",
        },
        substitutions=["FusedAdam was replaced by torch's AdamW: this machine has no compiler"],
        unavailable=["FusedAdam was replaced by torch's AdamW: this machine has no compiler"],
        steps=[step(number, 4, 2, **wrong_step) for number in (1, 2, 3)],
        causes=[
            Cause(
                id="loss-scaled-twice",
                confidence="certain",
                summary="The loss is divided by the 4 accumulation steps twice: once in the loop or the model, and "
                "once more by DeepSpeed in engine.backward.",
                evidence={"weights": 1 / 32, "due": 1 / 8},
                fix="hand engine.backward the undivided mean loss: delete `loss = loss / 4` in train.py, or call "
                "engine.backward(loss, scale_wrt_gas=False)",
            )
        ],
    )


def untested_update() -> VerifyRecord:
    """An optimizer without a reference: nothing failed, and nothing is proven."""
    claims = {**dict.fromkeys(Claims.model_fields, "pass"), "update": "untested"}
    return record(
        claims=Claims(**claims),
        reasons={"update": "there is no reference for the optimizer Lion"},
        steps=[step(1, 4, 2, update=UpdateRecord())],
    )


def ranks_not_reduced() -> VerifyRecord:
    """N = 3, W = 2: each rank keeps its own gradient."""
    own = [[[1 / 3 if rank == owner else 0.0 for rank in (0, 1)] for _ in range(3)] for owner in (0, 1)]
    off = [TensorOff(name=f"layers.{number}.weight", ratio=1.3, error=0.9, bound=1e-6) for number in range(30)]
    gradient = GradientRecord(error=0.9, bound=1e-6, ratio=1.3, residual=0.9, worst_parameter="a", tensors_off=off)
    claims = {**dict.fromkeys(Claims.model_fields, "pass"), "gradient": "fail", "replicas": "fail"}
    wrong = step(2, 3, 2, micro_batch_weights=weights(3, 2, own[0], own), gradient=gradient)
    return record(accumulation_steps=3, claims=Claims(**claims), steps=[step(1, 3, 2), wrong])
