"""The plan against the real engine under MemTracker, and its slope over B against resident memory.

Run: pytest tests/planning/test_against_engine.py -m slow -n 0 (some 10 s for each of the 12 configurations). One rank
only; not covered: GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dsaccum.planning.prediction import EngineWindow, Peaks
from dsaccum.planning.settings import EngineSettings
from dsaccum.planning.trace import MicroStep
from tests.planning.measured import measured
from tests.planning.subjects import deepspeed_config, fake_run

WITHIN = 0.05
SLOPE_WITHIN = 0.25
BUCKET = 1_000_000
LLAMA = {
    "architecture": "llama",
    "config": {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
GPT2 = {"architecture": "gpt2", "config": {"n_embd": 256, "n_layer": 6, "n_head": 4}}

# Architecture, length, B, N, stage, precision, accumulation, checkpointing.
CONFIGURATIONS: list[tuple[dict[str, Any], int, int, int, int, str, str | None, bool]] = [
    (LLAMA, 64, 4, 3, 0, "fp32", None, False),
    (LLAMA, 256, 2, 2, 1, "fp32", None, False),
    (LLAMA, 256, 8, 2, 1, "bf16", "fp32", False),
    (LLAMA, 128, 4, 2, 2, "bf16", "fp32", True),
    (LLAMA, 64, 16, 3, 3, "fp32", None, False),
    (LLAMA, 128, 8, 2, 0, "autocast", None, False),
    (GPT2, 256, 2, 1, 0, "fp32", None, True),
    (GPT2, 64, 8, 2, 0, "bf16", None, False),
    (GPT2, 128, 8, 2, 1, "bf16", None, False),
    (GPT2, 256, 4, 3, 2, "fp32", None, False),
    (GPT2, 128, 8, 2, 3, "bf16", "fp32", False),
    (GPT2, 64, 16, 2, 2, "autocast", None, False),
]


def subject(configuration: tuple[Any, ...], **changes: Any) -> dict[str, Any]:
    model, length, rows, steps, stage, precision, accumulation, checkpointing = configuration
    config = deepspeed_config(stage, precision, accumulation, reduce_bucket_size=BUCKET)
    return {
        "model": {**model, "activation_checkpointing": checkpointing},
        "sequence_length": length,
        "vocabulary": 2000,
        "micro_batch": rows,
        "steps": steps,
        "config": config,
        **changes,
    }


def planned(wanted: dict[str, Any], change: Any = lambda step: step) -> Peaks:
    """The plan's own peaks, of a micro-step that may be changed on the way."""
    rows, steps, length = (wanted[name] for name in ("micro_batch", "steps", "sequence_length"))
    checkpointing = wanted["model"]["activation_checkpointing"]
    run = fake_run(wanted["model"], length, wanted["vocabulary"])
    settings = EngineSettings.of(wanted["config"], "cpu")
    step: MicroStep = change(run.micro_step(settings.numerics.precision, checkpointing=checkpointing).at(rows))
    engine = settings.engine(run.model(checkpointing=checkpointing), 1, 0)
    return EngineWindow.of(engine, step, steps).peaks(step, run.fields * 8 * rows * length * steps)


def agrees(plan: Peaks, real: dict[str, Any]) -> bool:
    """Both the peak of all, which the optimizer step may hide B from, and that of the forward pass."""
    peak = abs(plan.peak.total / real["peak_bytes"] - 1)
    if real["forward_bytes"] is None:
        return peak <= WITHIN
    forward = abs(plan.by_phase["forward"].total / real["forward_bytes"] - 1)
    print(f"peak {plan.peak.total / real['peak_bytes'] - 1:+.2%} of {real['peak_bytes'] / 1e6:.1f} MB in "
          f"{plan.phase}, forward {plan.by_phase['forward'].total / real['forward_bytes'] - 1:+.2%}")  # fmt: skip
    return max(peak, forward) <= WITHIN


def name_of(configuration: tuple[Any, ...]) -> str:
    model, length, rows, steps, stage, precision, accumulation, checkpointing = configuration
    kept = f"+{accumulation}" if accumulation else ""
    return f"{model['architecture']}-{length}-{steps}x{rows}-zero{stage}-{precision}{kept}{'-ckpt' * checkpointing}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=name_of)
def test_the_predicted_peak_is_memtrackers(configuration: tuple[Any, ...]) -> None:
    wanted = subject(configuration)
    assert agrees(planned(wanted), measured(wanted))


def kept(step: MicroStep) -> MicroStep:
    """As if each micro-step found the activations of one before it still alive."""
    return replace(step, alive=step.alive + step.alive[~step.backward].max())


def without_logits(step: MicroStep) -> MicroStep:
    """As if logits weighed nothing."""
    return replace(step, alive=step.alive - step.logits, logits=np.zeros_like(step.logits))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mistake", [kept, without_logits])
def test_a_term_too_many_or_too_few_is_noticed(mistake: Any) -> None:
    wanted = subject(CONFIGURATIONS[0], micro_batch=16)
    real = measured(wanted)
    assert agrees(planned(wanted), real)
    assert not agrees(planned(wanted, mistake), real)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("configuration", [(LLAMA, 256, 0, 2, 0, "fp32", None, False),
                                           (GPT2, 256, 0, 2, 1, "bf16", None, False)], ids=name_of)  # fmt: skip
def test_resident_memory_grows_with_the_micro_batch_as_predicted(configuration: tuple[Any, ...]) -> None:
    small, large = (subject(configuration, micro_batch=rows) for rows in (16, 32))
    predicted = {rows["micro_batch"]: planned(rows).peak for rows in (small, large)}
    activations = predicted[32].by_category["activations"] + predicted[32].by_category["logits"]
    assert activations > 500e6
    resident = [measured({**each, "resident": True})["resident_bytes"] for each in (small, large)]
    slope, due = (resident[1] - resident[0]) / 16, (predicted[32].total - predicted[16].total) / 16
    print(f"{due / 1e6:.2f} MB a sample predicted, {slope / 1e6:.2f} MB resident")
    assert abs(slope / due - 1) <= SLOPE_WITHIN
