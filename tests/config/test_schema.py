"""The schema asked of the installed DeepSpeed. Run with ``pytest tests/config``."""

from __future__ import annotations

import pytest

from dsaccum.engine.schema import installed_schema, rehearse

COUNTS = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}


def config_with(scheduler_type, lr=1.0, **parameters):
    optimizer = {"type": "AdamW", "params": {"lr": lr}}
    return COUNTS | {"optimizer": optimizer, "scheduler": {"type": scheduler_type, "params": parameters}}


def test_keys_are_those_that_the_parser_asks_for():
    schema = installed_schema()
    assert {"train_batch_size", "gradient_clipping", "zero_optimization", "bf16"} <= schema.top_level.defaults.keys()
    assert "gradient_accumulation_step" not in schema.top_level.defaults
    assert not schema.removed.keys() & schema.top_level.defaults.keys()
    assert schema.sections["flops_profiler"].defaults["profile_step"] == 1
    assert "stage3_prefetch_bucket_size" in schema.sections["zero_optimization"].defaults


def test_calls_know_what_they_need():
    schema = installed_schema()
    assert schema.schedulers["WarmupDecayLR"].required == {"total_num_steps"}
    assert "LambdaLR" not in schema.schedulers
    assert {"lr", "betas", "torch_adam"} <= schema.own_optimizers["adamw"].parameters
    assert "AdamW" in schema.tested_with_zero
    assert "SGD" not in schema.tested_with_zero


@pytest.mark.parametrize(
    ("config", "rates"),
    [
        # Fact 22: a warm-up from 0 applies the rate 0 twice.
        (config_with("WarmupLR", warmup_num_steps=10, warmup_max_lr=1.0, warmup_type="linear"), [0, 0, 0.1]),
        # WarmupCosineLR starts at 0 whatever its minimum is.
        (config_with("WarmupCosineLR", warmup_num_steps=10, total_num_steps=20, warmup_min_ratio=0.5), [0, 0.5]),
        (config_with("StepLR", step_size=2, gamma=0.5), [1, 1, 0.5]),
    ],
)
def test_rehearsal_gives_the_rates_of_the_real_scheduler(config, rates):
    assert rehearse(config, len(rates)) == pytest.approx(rates)


def test_rehearsal_raises_what_deepspeed_has_against_it():
    with pytest.raises(ValueError, match="communication_data_type"):
        rehearse(config_with("StepLR", step_size=1) | {"communication_data_type": "int4"}, 1)
