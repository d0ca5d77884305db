"""The DeepSpeed JSON resolved: flags, "auto", precision, and the shipped files.

Run with ``pytest tests/config``. Whole bad and sound inputs are in tests/configs/inputs; nothing is trained here.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from dsaccum.config.deepspeed import load_deepspeed_config
from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import AutoConfig, Experiment, ModelConfig, RunConfig
from dsaccum.config.schema import Machine
from dsaccum.engine.schema import installed_schema

SHIPPED = Path(__file__).parents[2] / "ds_configs"
PLAIN = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


@pytest.fixture
def load(tmp_path):
    """Load PLAIN with changes (None deletes a key), on a CPU without a compiler."""

    def load_changed(changes=None, *, auto=None, world_size=1, steps=100, machine=None, **flags):
        path = tmp_path / "changed.json"
        config = {key: value for key, value in (PLAIN | (changes or {})).items() if value is not None}
        path.write_text(json.dumps(config))
        machine = machine or Machine(device="cpu", has_compiler=False, supports_fp16=False)
        return load_deepspeed_config(
            path,
            schema=dataclasses.replace(installed_schema(), machine=machine),
            experiment=Experiment(
                name="x",
                model=ModelConfig(architecture="gpt2"),
                auto=AutoConfig(**(auto or {})),
                run=RunConfig(steps=steps),
            ),
            world_size=world_size,
            **flags,
        )

    return load_changed


def numbers(settings):
    return (settings.batch.total, settings.batch.accumulation_steps, settings.batch.micro_batch)


E, N, B = "train_batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    ("changes", "flags", "expected", "moved"),
    [
        ({}, {}, (16, 4, 4), []),
        ({E: 16, N: None}, {}, (16, 4, 4), []),
        # E is not stated: the flag replaces its number, and E follows.
        ({}, {"accumulation_steps": 2}, (8, 2, 4), []),
        ({}, {"micro_batch": 2}, (8, 4, 2), []),
        # E is stated: it stays, and the third number moves.
        ({E: 16}, {"accumulation_steps": 8}, (16, 8, 2), [B]),
        ({E: 16}, {"micro_batch": 2}, (16, 8, 2), [N]),
        ({E: 16}, {"accumulation_steps": 4}, (16, 4, 4), []),
        ({E: 16, N: None}, {"accumulation_steps": 2}, (16, 2, 8), [B]),
        # Both flags say everything.
        ({E: 16}, {"accumulation_steps": 3, "micro_batch": 5}, (15, 3, 5), [E]),
        ({E: "auto", N: "auto", B: "auto"}, {"accumulation_steps": 2, "micro_batch": 3}, (6, 2, 3), []),
        ({E: "auto"}, {}, (16, 4, 4), []),
    ],
)
def test_flags_move_what_they_must_and_say_so(load, changes, flags, expected, moved):
    settings = load(changes, **flags)
    assert numbers(settings) == expected
    assert (settings.config[E], settings.config[N], settings.config[B]) == expected
    assert [warning.split()[0] for warning in settings.warnings] == moved


def test_the_world_counts(load):
    assert load(world_size=4).batch.total == 64
    assert numbers(load({E: 64, B: None}, world_size=2)) == (64, 4, 8)


def test_auto_takes_values_from_the_experiment(load):
    auto = {"lr": 2e-3, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.2, "warmup_num_steps": 5}
    changes = {
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"torch_adam": True, "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": False},
    }
    settings = load(changes, auto=auto | {"gradient_clipping": 0.5}, steps=40)
    config = settings.config
    expected = {"torch_adam": True, "lr": 2e-3, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.2}
    assert config["optimizer"]["params"] == expected
    assert config["scheduler"]["params"] == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 2e-3,
        "warmup_num_steps": 5,
        "total_num_steps": 40,
    }
    assert config["zero_optimization"] == {"stage": 2, "overlap_comm": False}
    assert settings.gradient_clipping == 0.5


def test_warm_up_ends_at_the_written_rate(load):
    scheduler = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": "auto", "warmup_min_lr": "auto", "warmup_num_steps": 5},
    }
    settings = load({"scheduler": scheduler}, auto={"warmup_min_lr": 1e-5})
    assert settings.config["scheduler"]["params"]["warmup_max_lr"] == 1e-3
    assert settings.config["scheduler"]["params"]["warmup_min_lr"] == 1e-5
    assert settings.warnings == []


@pytest.mark.parametrize(
    ("changes", "stage", "precision", "accumulation"),
    [
        ({}, 0, "fp32", "fp32"),
        ({"bf16": {"enabled": True}}, 0, "bf16", "bf16"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "float32"}}, 1, "bf16", "fp32"),
        ({"torch_autocast": {"enabled": True, "dtype": "bf16"}}, 0, "autocast bf16", "fp32"),
        ({"torch_autocast": {"enabled": True, "dtype": "half"}}, 0, "autocast fp16", "fp32"),
        ({"fp16": {"enabled": True}}, 1, "fp16", "fp16"),
    ],
)
def test_precision_and_accumulation_type(load, changes, stage, precision, accumulation):
    gpu = Machine(device="cuda", has_compiler=True, supports_fp16=True)
    settings = load(changes | {"zero_optimization": {"stage": stage}}, machine=gpu)
    assert (settings.zero_stage, settings.precision, settings.accumulation_dtype) == (stage, precision, accumulation)


def test_offload_with_torch_adam_needs_no_compiler(load):
    """Measured: ZeRO 1 to 3 train with offload_optimizer and torch_adam where PATH has no compiler."""
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert load({"zero_optimization": zero}).zero_stage == 2
    with pytest.raises(ConfigError, match="compiler"):
        load({"zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})


def test_the_file_and_the_written_config_stay_apart(load, tmp_path):
    first = load({"zero_optimization": {"stage": 1}})
    first.config["zero_optimization"]["stage"] = 3
    assert json.loads((tmp_path / "changed.json").read_text())["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize(("world_size", "divisor"), [(1, 1), (2, 2)])
def test_shipped_files_are_sound_and_warn_of_nothing(path, world_size, divisor):
    experiment = Experiment(
        name="x",
        model=ModelConfig(architecture="gpt2"),
        auto=AutoConfig(lr=3e-3, warmup_min_lr=3e-4, warmup_num_steps=10),
        run=RunConfig(steps=150),
    )
    machine = Machine(device="cpu", has_compiler=False, supports_fp16=False)
    written = json.loads(path.read_text())
    settings = load_deepspeed_config(
        path,
        schema=dataclasses.replace(installed_schema(), machine=machine),
        experiment=experiment,
        world_size=world_size,
        micro_batch=max(1, written[B] // divisor),
    )
    assert settings.warnings == []
    assert settings.batch.total == (32 if path.stem == "accum16" and world_size == 2 else 16)
    assert settings.gradient_clipping == 1.0
    assert settings.accumulation_dtype == "fp32"
