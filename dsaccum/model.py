"""The model: any causal language model of transformers, or a function of the user's own. No DeepSpeed here."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dsaccum.config.errors import ConfigError, nearest
from dsaccum.config.factories import call_factory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from dsaccum.config.experiment import ModelConfig


def build_model(
    config: ModelConfig,
    *,
    vocabulary_size: int,
    sequence_length: int,
    seed: int,
    end_token: int,
    pad_token: int,
    source: str | Path,
    weights: bool = True,
) -> nn.Module:
    """Build the experiment's model in float32 on the CPU, in training mode; equal seeds give equal weights.

    Args:
        config: the ``model`` section of the experiment.
        vocabulary_size: ``len(tokenizer)``; the embedding of a new model has this many rows.
        sequence_length: tokens per sample; a new model's positions are sized to it.
        seed: of the initial weights.
        end_token: id that ends a document.
        pad_token: id that fills up a row.
        source: the experiment's file, for messages.
        weights: False makes a pretrained model with weights at random: its files are not read.

    Raises:
        ConfigError: unknown architecture or override, a model that cannot be loaded or is too small for the data.
    """
    torch.manual_seed(seed)
    if config.factory is not None:
        model = _from_factory(config.factory, vocabulary_size, sequence_length, source)
    else:
        token_ids = {"bos_token_id": end_token, "eos_token_id": end_token, "pad_token_id": pad_token}
        if config.pretrained is not None:
            model = _from_pretrained(config, vocabulary_size, sequence_length, source, weights=weights)
        else:
            sizes = {"vocab_size": vocabulary_size, "max_position_embeddings": sequence_length, "use_cache": False}
            model = _from_architecture(config, {**sizes, **token_ids}, sequence_length, source)
    if config.activation_checkpointing:
        _checkpoint_activations(model, source)
    return model.train()


def _from_architecture(
    config: ModelConfig, defaults: dict[str, Any], sequence_length: int, source: str | Path
) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

    architecture = str(config.architecture)
    if architecture not in CAUSAL_LM:
        guess = nearest(architecture, CAUSAL_LM)
        raise ConfigError(
            "is not a causal-LM model_type of the installed transformers",
            source=source,
            key="model.architecture",
            value=architecture,
            allowed=f"{len(CAUSAL_LM)} types, e.g. gpt2, llama, gpt_neox, qwen2, opt",
            fix=f"architecture: {guess}" if guess else None,
        )
    base = AutoConfig.for_model(architecture)
    overrides = _checked_overrides(base, config.config, source)
    # Some configs have names of their own for common fields (GPT-2's n_positions is max_position_embeddings).
    wanted = {key: value for key, value in defaults.items() if not {key, base.attribute_map.get(key)} & set(overrides)}
    try:
        resolved = AutoConfig.for_model(architecture, **{**wanted, **_without_dropout(base), **overrides})
        _check_sizes(resolved, defaults["vocab_size"], sequence_length, source)
        return AutoModelForCausalLM.from_config(resolved, dtype=torch.float32)
    except ConfigError:
        raise
    except Exception as error:
        problem = f"transformers cannot build this model ({type(error).__name__}: {error})"
        raise ConfigError(problem, source=source, key="model.config", value=config.config) from error


def _from_pretrained(
    config: ModelConfig, vocabulary_size: int, sequence_length: int, source: str | Path, *, weights: bool
) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    name = str(config.pretrained)
    try:
        base = AutoConfig.from_pretrained(name)
        overrides = _checked_overrides(base, config.config, source)
        changes = {**_without_dropout(base), **overrides, "use_cache": False}
        for key, value in changes.items():
            setattr(base, key, value)
        _check_sizes(base, vocabulary_size, sequence_length, source)
        if not weights:
            return AutoModelForCausalLM.from_config(base, dtype=torch.float32)
        model, report = AutoModelForCausalLM.from_pretrained(
            name, config=base, dtype=torch.float32, output_loading_info=True
        )
        if report["missing_keys"] or report.get("mismatched_keys"):
            missing = sorted([*report["missing_keys"], *map(str, report.get("mismatched_keys", []))])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ConfigError(
                f"it holds no weights for {', '.join(missing[:3])}{more}, which would start at random",
                source=source,
                key="model.pretrained",
                value=name,
                fix="a checkpoint that fits its config.json and model.config",
            )
        return model
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"the model cannot be loaded ({reason})",
            source=source,
            key="model.pretrained",
            value=name,
            allowed="a directory written by save_pretrained, or a hub id that this machine can reach",
        ) from error


def _from_factory(factory: str, vocabulary_size: int, sequence_length: int, source: str | Path) -> nn.Module:
    model = call_factory(
        factory, source=source, key="model.factory", vocabulary_size=vocabulary_size, sequence_length=sequence_length
    )
    if not isinstance(model, nn.Module):
        problem = f"it returned {type(model).__name__}"
        raise ConfigError(problem, source=source, key="model.factory", value=factory, allowed="a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("the model has nothing to train", source=source, key="model.factory", value=factory)
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:  # DeepSpeed would step it as it is, without a float32 master
            problem = f"its parameter {name} is {str(parameter.dtype).removeprefix('torch.')}"
            allowed = "parameters in float32; the DeepSpeed JSON alone chooses the precision of training"
            fix = 'return model.float(), with "bf16": {"enabled": true} in the JSON if that is wanted'
            raise ConfigError(problem, source=source, key="model.factory", value=factory, allowed=allowed, fix=fix)
    return model


def _checked_overrides(base: PretrainedConfig, overrides: dict[str, Any], source: str | Path) -> dict[str, Any]:
    """Refuse names that the architecture does not have: transformers would keep them and never read them."""
    known = set(base.to_dict()) | set(base.attribute_map) | set(inspect.signature(type(base).__init__).parameters)
    for key, value in overrides.items():
        if key not in known:
            guess = nearest(key, known)
            raise ConfigError(
                f"{type(base).__name__} has no such field",
                source=source,
                key=f"model.config.{key}",
                value=value,
                allowed=None if guess else ", ".join(sorted(map(str, _sizes_of(base)))),
                fix=f"did you mean {guess}?" if guess else None,
            )
    return overrides


def _sizes_of(base: PretrainedConfig) -> list[str]:
    """The fields that people set: whole numbers that say how large a model is."""
    return [key for key, value in base.to_dict().items() if type(value) is int and not key.endswith("_id")]


def _without_dropout(base: PretrainedConfig) -> dict[str, float]:
    """Every dropout rate as 0: masks depend on the batch's shape, so with dropout no split of E equals another."""
    return {
        key: 0.0
        for key, value in base.to_dict().items()
        if ("drop" in key or key.endswith("pdrop")) and isinstance(value, float)
    }


def _check_sizes(config: PretrainedConfig, vocabulary_size: int, sequence_length: int, source: str | Path) -> None:
    rows = getattr(config, "vocab_size", vocabulary_size)
    if rows < vocabulary_size:
        raise ConfigError(
            f"the model has {rows} embedding rows, the tokenizer {vocabulary_size} ids",
            source=source,
            key="model.config.vocab_size",
            value=rows,
            allowed=f"at least {vocabulary_size}",
            fix="leave vocab_size out, or name the model's own tokenizer in data.tokenizer",
        )
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < sequence_length:
        raise ConfigError(
            f"samples are longer than the model's {positions} positions",
            source=source,
            key="data.sequence_length",
            value=sequence_length,
            allowed=f"1 to {positions}",
            fix=f"sequence_length: {positions}",
        )


def _checkpoint_activations(model: nn.Module, source: str | Path) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if not callable(enable) or not getattr(model, "supports_gradient_checkpointing", True):
        raise ConfigError(
            f"{type(model).__name__} cannot recompute its activations",
            source=source,
            key="model.activation_checkpointing",
            value=True,
            fix="activation_checkpointing: false",
        )
    # Re-entrant checkpointing runs a backward inside the backward, which DeepSpeed's hooks count as two.
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
