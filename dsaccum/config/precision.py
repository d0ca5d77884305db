"""In which number format the JSON computes and accumulates, and where DeepSpeed would get that wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsaccum.config.errors import ConfigError
from dsaccum.config.schema import Machine

Precision = Literal["fp32", "bf16", "fp16", "autocast bf16", "autocast fp16"]
NumberFormat = Literal["fp32", "bf16", "fp16"]

_SPELLINGS: dict[str, NumberFormat] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
}


@dataclass(frozen=True)
class Numerics:
    """How numbers are kept.

    Args:
        precision: of forward and backward.
        accumulation: of the gradients that micro-batches add up in.
    """

    precision: Precision
    accumulation: NumberFormat


def resolve_numerics(config: Mapping[str, Any], zero_stage: int, machine: Machine) -> Numerics:
    """Read precision and accumulation type, and refuse what DeepSpeed cannot do or does wrong.

    Raises:
        ConfigError: without a source.
    """
    enabled = [name for name in ("bf16", "fp16", "torch_autocast") if config.get(name, {}).get("enabled", False)]
    if len(enabled) > 1:
        raise ConfigError(
            f"is on together with {enabled[1]}, and only one can be",
            key=f"{enabled[0]}.enabled",
            fix=f'write "enabled": false in {enabled[1]}',
        )
    if enabled == ["torch_autocast"]:
        lower = _autocast_format(config["torch_autocast"], machine)
        precision: Precision = "autocast bf16" if lower == "bf16" else "autocast fp16"
        weights: NumberFormat = "fp32"
    else:
        weights = precision = {"bf16": "bf16", "fp16": "fp16"}.get("".join(enabled), "fp32")  # type: ignore[assignment]
    if precision == "fp16":
        _check_fp16(zero_stage, machine)
    return Numerics(precision, _accumulation(config, weights, zero_stage))


def number_format(key: str, value: str) -> NumberFormat:
    """DeepSpeed's several spellings of a number format, as one.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in _SPELLINGS:
        raise ConfigError("is no number format", key=key, value=value, allowed='"fp32", "bf16" or "fp16"')
    return _SPELLINGS[value]


def _autocast_format(section: Mapping[str, Any], machine: Machine) -> NumberFormat:
    key = "torch_autocast.dtype"
    if "dtype" not in section:
        raise ConfigError(
            "is missing, and torch would take another one on each device", key=key, fix='write "dtype": "bfloat16"'
        )
    lower = number_format(key, section["dtype"])
    if lower == "fp32" or (lower == "fp16" and not machine.supports_fp16):
        problem = "lowers nothing" if lower == "fp32" else "needs a GPU"
        raise ConfigError(problem, key=key, value=section["dtype"], fix='write "dtype": "bfloat16"')
    return lower


def _check_fp16(zero_stage: int, machine: Machine) -> None:
    key = "fp16.enabled"
    if not machine.supports_fp16:
        raise ConfigError("needs a GPU", key=key, value=True, fix='write "bf16": {"enabled": true} instead')
    if zero_stage == 0:
        raise ConfigError(
            "at ZeRO 0 DeepSpeed divides gradients by a loss scale that it never multiplied the loss by",
            key=key,
            value=True,
            fix='write "zero_optimization": {"stage": 1}, or use bf16',
        )


def _accumulation(config: Mapping[str, Any], weights: NumberFormat, zero_stage: int) -> NumberFormat:
    key = "data_types.grad_accum_dtype"
    value = config.get("data_types", {}).get("grad_accum_dtype")
    if value is None:
        return weights
    accumulation = number_format(key, value)
    if zero_stage == 0 and accumulation != weights:
        raise ConfigError(
            f"DeepSpeed cannot accumulate {weights} gradients in {accumulation} at ZeRO 0",
            key=key,
            value=value,
            fix='write "zero_optimization": {"stage": 1}',
        )
    return accumulation
