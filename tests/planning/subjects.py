"""Small models and configs to plan for: their embeddings, layers and logits all weigh something."""

from __future__ import annotations

from typing import Any

from dsaccum.config.experiment import Experiment
from dsaccum.planning.engines.layout import Layout, OptimizerUse
from dsaccum.planning.fakes import FakeRun

LLAMA = {
    "architecture": "llama",
    "config": {
        "hidden_size": 64,
        "intermediate_size": 172,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
GPT2 = {"architecture": "gpt2", "config": {"n_embd": 64, "n_layer": 5, "n_head": 4}}


class Vocabulary:
    """What a model needs to know of a tokenizer."""

    end_token, pad_token = 1, 0

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def experiment(model: dict[str, Any], sequence_length: int = 32, **data: Any) -> Experiment:
    return Experiment.model_validate(
        {"name": "planned", "model": model, "data": {"sequence_length": sequence_length, **data}}
    )


def fake_run(model: dict[str, Any], sequence_length: int = 32, vocabulary: int = 300) -> FakeRun:
    return FakeRun(experiment(model, sequence_length), Vocabulary(vocabulary), "planned.yaml")  # type: ignore[arg-type]


def deepspeed_config(
    stage: int, precision: str = "fp32", accumulation: str | None = None, **zero: Any
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}},
        "zero_optimization": {"stage": stage, **zero},
    }
    if precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif precision != "fp32":
        config[precision] = {"enabled": True}
    if accumulation is not None:
        config["data_types"] = {"grad_accum_dtype": accumulation}
    return config


def adam(sizes: tuple[int, ...]) -> OptimizerUse:
    """Two states in fp32, and two temporaries of the largest tensor."""
    return OptimizerUse(8 * sum(sizes), 8 * max(sizes))


def layout(sizes: list[int], stage: int, **changes: Any) -> Layout:
    """Parameters of these sizes, in fp32 on one rank unless told otherwise; one module holds each."""
    settings: dict[str, Any] = {
        "trained": dict(enumerate(sizes)),
        "frozen": 0,
        "of_module": {index: [index] for index in range(len(sizes))},
        "stage": stage,
        "precision": "fp32",
        "accumulation": "fp32",
        "world_size": 1,
        "rank": 0,
        "device": "cpu",
        "clipping": True,
        "fused_adam": False,
        "reduce_bucket": 100,
        "overlaps": False,
        "scatters": True,
        "prefetch": 0,
        "max_live": 10**9,
        "max_reuse": 0,
        "persistence": 0,
        "sub_group": 10**9,
        "optimizer": adam,
        **changes,
    }
    settings.setdefault("communication", dict.fromkeys(range(len(sizes)), settings["precision"]))
    return Layout(**settings)
