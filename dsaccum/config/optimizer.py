"""The optimizer and the scheduler of the JSON: known names, known parameters, values that mean something."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dsaccum.config.errors import ConfigError, nearest
from dsaccum.config.keys import unquoted
from dsaccum.config.schema import CallSchema, DeepSpeedSchema

ADAM_FAMILY = ("adam", "adamw")


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number; true and false are none."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float holds
        return False


def check_gradient_clipping(config: Mapping[str, Any]) -> None:
    """Refuse a limit that is missing or no number: DeepSpeed reads absence as 1.0, and crashes on text at step 1.

    Raises:
        ConfigError: without a source, as all checks here.
    """
    key = "gradient_clipping"
    if key not in config:
        raise ConfigError(
            "is missing, and what DeepSpeed takes instead changed from 0 to 1.0 between versions",
            key=key,
            fix=f'write "{key}": 1.0, or 0 for no clipping',
        )
    if not is_number(config[key]) or config[key] < 0:
        raise ConfigError(
            "is no limit", key=key, value=config[key], allowed="a number, 0 for none", fix=f'"{key}": 1.0'
        )


def check_optimizer(config: Mapping[str, Any], schema: DeepSpeedSchema) -> None:
    """Refuse an optimizer that DeepSpeed does not have, or parameters that it does not take."""
    section = config.get("optimizer")
    if section is None or "type" not in section:
        key = "optimizer" if section is None else "optimizer.type"
        fix = 'write "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": true}}'
        raise ConfigError("is missing", key=key, fix=fix)
    name, parameters = section["type"], section.get("params", {})
    if "max_grad_norm" in parameters:
        limit = parameters["max_grad_norm"]
        raise ConfigError(
            "is not read by the optimizer",
            key="optimizer.params.max_grad_norm",
            value=limit,
            fix=f'write "gradient_clipping": {limit} at the top level instead',
        )
    _check_parameters("optimizer", name, parameters, _optimizer_call(name, parameters, schema))


def check_scheduler(config: Mapping[str, Any], schema: DeepSpeedSchema) -> None:
    """Refuse a scheduler that neither DeepSpeed nor torch has, or whose parameters are unknown or missing."""
    section = config.get("scheduler")
    if section is None:
        return
    name = section.get("type")
    if name is None:
        raise ConfigError("is missing", key="scheduler.type", fix='write "type": "WarmupDecayLR"')
    if name not in schema.schedulers:
        raise _unknown_name("scheduler.type", name, schema.schedulers)
    if "params" not in section:
        raise ConfigError("is missing, and DeepSpeed crashes on that", key="scheduler.params", fix='write "params": {}')
    _check_parameters("scheduler", name, section["params"], schema.schedulers[name])


def _optimizer_call(name: str, parameters: Mapping[str, Any], schema: DeepSpeedSchema) -> CallSchema:
    own = schema.own_optimizers.get(name.lower())
    if own is not None and name.lower() in ADAM_FAMILY and parameters.get("torch_adam") is True:
        torch_adam = schema.torch_optimizers["AdamW"].defaults
        # DeepSpeed takes these out before it hands the rest to torch.
        return CallSchema({**torch_adam, "torch_adam": False, "adam_w_mode": True, "fp32_optimizer_states": None})
    if own is not None:
        return own
    if name not in schema.torch_optimizers:
        own_names = {"adam": "Adam", "adamw": "AdamW"}
        known = [own_names.get(other, other.capitalize()) for other in schema.own_optimizers]
        raise _unknown_name("optimizer.type", name, [*known, *schema.torch_optimizers])
    return schema.torch_optimizers[name]


def _unknown_name(key: str, name: str, known: Any) -> ConfigError:
    guess = nearest(name, known)
    fix = f'write "{guess}"' if guess else None
    allowed = None if guess else ", ".join(sorted(set(known)))
    return ConfigError("DeepSpeed has none of that name", key=key, value=name, allowed=allowed, fix=fix)


def _check_parameters(section: str, owner: str, parameters: Mapping[str, Any], call: CallSchema) -> None:
    for name, value in parameters.items():
        key = f"{section}.params.{name}"
        if name not in call.parameters:
            guess = nearest(name, call.parameters)
            fix = f'write "{guess}"' if guess else "delete it"
            allowed = None if guess else ", ".join(sorted(call.parameters))
            raise ConfigError(f"{owner} has no such parameter", key=key, allowed=allowed, fix=fix)
        _check_value(key, value, name, call)
    for name in sorted(call.required - parameters.keys()):
        fix = '"total_num_steps": "auto"' if name == "total_num_steps" else f'"{name}": ...'
        raise ConfigError(f"{owner} needs it", key=f"{section}.params.{name}", fix=f"write {fix}")


def _is_rate(value: Any) -> bool:
    return is_number(value) and value >= 0


def _are_betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in value)


def _is_positive_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_VALUE_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("lr", "eps", "weight_decay", "warmup_min_lr", "warmup_max_lr", "muon_lr", "adam_lr", "warmup_min_ratio"),
        (_is_rate, "a number, 0 or more"),
    ),
    "betas": (_are_betas, "two numbers from 0 to below 1"),
    **dict.fromkeys(("warmup_num_steps", "total_num_steps"), (_is_positive_count, "a whole number, 1 or more")),
    "warmup_type": (lambda value: value in ("log", "linear"), '"log" or "linear"'),
}


def _check_value(key: str, value: Any, name: str, call: CallSchema) -> None:
    default = call.defaults.get(name)
    if name in _VALUE_RULES:
        accepts, allowed = _VALUE_RULES[name]
    elif isinstance(default, bool):
        accepts, allowed = (lambda given: isinstance(given, bool)), "true or false"
    elif is_number(default):
        accepts, allowed = (lambda given: is_number(given)), "a number"
    else:
        return
    if not accepts(value):
        raise ConfigError("is no value for it", key=key, value=value, allowed=allowed, fix=unquoted(value, accepts))
