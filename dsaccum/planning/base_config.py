"""The DeepSpeed JSON that a plan starts from where the user gives none, and the one that it writes."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from dsaccum.batch import MICRO_BATCH_KEY, STEPS_KEY, TOTAL_KEY, EffectiveBatch
from dsaccum.config.experiment import Experiment

_LARGEST_BUCKET = 50_000_000
"""Elements: 200 MB in fp32, where DeepSpeed's default of 5e8 takes 2 GB at ZeRO 1 to 3."""
_RATE = 3e-4


def default_config(experiment: Experiment, elements: int) -> dict[str, Any]:
    """fp32, ZeRO 0 and torch's AdamW, as shipped; what the experiment's ``auto`` block states is left to it.

    Args:
        experiment: what is trained.
        elements: of the model's parameters; a larger bucket would be of no use.
    """
    # DeepSpeed wants an even number of elements in a bucket that it gathers.
    bucket = min(_LARGEST_BUCKET, elements + elements % 2)
    parameters: dict[str, Any] = {"torch_adam": True, "lr": _RATE}
    for name in ("lr", "betas", "eps", "weight_decay"):
        if getattr(experiment.auto, name) is not None:
            parameters[name] = "auto"
    config: dict[str, Any] = {
        "gradient_clipping": 1.0 if experiment.auto.gradient_clipping is None else "auto",
        "optimizer": {"type": "AdamW", "params": parameters},
        "zero_optimization": {"stage": 0, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
    }
    if experiment.auto.warmup_num_steps is not None:
        peak = "auto" if (experiment.auto.lr or experiment.auto.warmup_max_lr) is not None else _RATE
        config["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_type": "linear",
                "warmup_min_lr": "auto",
                "warmup_max_lr": peak,
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        }
    return config


def with_batch(config: Mapping[str, Any], batch: EffectiveBatch) -> dict[str, Any]:
    """The JSON with E, N and B as planned, in front."""
    numbers = {
        TOTAL_KEY: batch.total,
        MICRO_BATCH_KEY: batch.micro_batch,
        STEPS_KEY: batch.accumulation_steps,
    }
    return {**numbers, **{key: value for key, value in copy.deepcopy(dict(config)).items() if key not in numbers}}


def as_text(config: Mapping[str, Any]) -> str:
    """The JSON as a file."""
    return json.dumps(config, indent=2) + "\n"
