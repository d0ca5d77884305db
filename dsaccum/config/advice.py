"""Warnings: what runs, and yet may not be what was meant. One line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dsaccum.config.combinations import is_compiled_here, look_up
from dsaccum.config.precision import Numerics
from dsaccum.config.schema import DeepSpeedSchema

_WITHOUT_EFFECT = {
    "dataloader_drop_last": "has no effect: the experiment's data.last_window decides",
    "vocabulary_size": "has no effect: the vocabulary comes from the tokenizer",
    "activation_checkpointing": "has no effect: write `activation_checkpointing: true` under `model:`",
}


def warnings_for(
    config: Mapping[str, Any], numerics: Numerics, steps: int, first_rates: Sequence[float], schema: DeepSpeedSchema
) -> list[str]:
    """Everything worth a line about a config that will run.

    Args:
        config: resolved.
        numerics: its precision and accumulation type.
        steps: optimizer steps of the run.
        first_rates: learning rates of its first updates, as DeepSpeed's own scheduler gives them.
        schema: of the installed DeepSpeed, with the machine.
    """
    return [
        *(f"{key} {reason}" for key, reason in _WITHOUT_EFFECT.items() if config.get(key)),
        *_about_optimizer(config, schema),
        *_about_scheduler(config, steps, first_rates, schema),
        *_about_numerics(config, numerics),
    ]


def _about_optimizer(config: Mapping[str, Any], schema: DeepSpeedSchema) -> Iterator[str]:
    optimizer = config["optimizer"]
    name, parameters = optimizer["type"].lower(), optimizer.get("params", {})
    if is_compiled_here(config, schema.machine):
        yield (
            f'optimizer.type "{optimizer["type"]}" is compiled before the first step (about 40 s the first time); '
            '"torch_adam": true in optimizer.params avoids that'
        )
    if name == "adam" and "adam_w_mode" not in parameters and parameters.get("weight_decay", 0):
        yield 'optimizer.type "Adam" decays weights as AdamW does; "adam_w_mode": false in optimizer.params gives Adam'


def _about_scheduler(
    config: Mapping[str, Any], steps: int, first_rates: Sequence[float], schema: DeepSpeedSchema
) -> Iterator[str]:
    if "scheduler" not in config:
        return
    name, parameters = config["scheduler"]["type"], config["scheduler"]["params"]
    values = {**schema.schedulers[name].defaults, **parameters}
    yield from _about_length(values, steps)
    yield from _about_peak(name, values, look_up(config, "optimizer.params.lr"))
    zeros = next((index for index, rate in enumerate(first_rates) if rate != 0), len(first_rates))
    if zeros:
        updates = "the first update" if zeros == 1 else f"the first {zeros} updates"
        yield f"scheduler {name}: the learning rate is exactly 0 at {updates}: no parameter changes"
    if name == "OneCycle" and values["cycle_momentum"]:
        yield 'scheduler OneCycle moves Adam\'s betas too; "cycle_momentum": false in scheduler.params keeps them'


def _about_length(values: Mapping[str, Any], steps: int) -> Iterator[str]:
    warmup, total = values.get("warmup_num_steps"), values.get("total_num_steps")
    if warmup is not None and warmup > steps:
        yield f"scheduler.params.warmup_num_steps {warmup} is longer than the run of {steps} optimizer steps"
    if total is not None and total > steps:
        yield f"scheduler.params.total_num_steps {total} is longer than the run of {steps} optimizer steps"
    if total is not None and total < steps:
        yield f"scheduler.params.total_num_steps {total} ends before the run of {steps} optimizer steps"


def _about_peak(name: str, values: Mapping[str, Any], lr: Any) -> Iterator[str]:
    peak = values.get("warmup_max_lr")
    if peak is not None and lr is not None and peak != lr:
        yield f"scheduler {name} rises to warmup_max_lr {peak:g}, not to optimizer.params.lr {lr:g}"


def _about_numerics(config: Mapping[str, Any], numerics: Numerics) -> Iterator[str]:
    if numerics.accumulation != "fp32" and config["gradient_accumulation_steps"] > 1:
        yield (
            f"gradients are accumulated in {numerics.accumulation}, and small contributions are lost as N grows; "
            'ZeRO 1 with "data_types": {"grad_accum_dtype": "fp32"} keeps them'
        )
    if numerics.precision == "fp32" and config.get("communication_data_type") in ("fp16", "bf16"):
        lower = config["communication_data_type"]
        yield f"communication_data_type {lower} rounds fp32 gradients when ranks are averaged"
