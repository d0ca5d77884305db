"""What DeepSpeed would take and then crash on, or read differently than the person who wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsaccum.config.errors import ConfigError
from dsaccum.config.optimizer import ADAM_FAMILY
from dsaccum.config.schema import DeepSpeedSchema, Machine


def _is_on(value: Any) -> bool:
    return bool(value.get("enabled", False)) if isinstance(value, dict) else bool(value)


def _is_off(value: Any) -> bool:
    return not _is_on(value)


def _is_present(value: Any) -> bool:
    return True


def _is_sum(value: Any) -> bool:
    return str(value).lower() == "sum"


def _is_false(value: Any) -> bool:
    return value is False


def _is_no_divisor(value: Any) -> bool:
    return not value > 0


def _is_several(value: Any) -> bool:
    return value not in (0, 1, None)


# key, when it is refused, why, what to do.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("managed_gradient_accumulation", _is_off, "windows are counted through DeepSpeed here", "delete it"),
    ("gradient_allreduce_op", _is_sum, "multiplies the gradient by the number of ranks", 'write "mean"'),
    ("curriculum_learning", _is_on, "changes the batches while training", "delete it"),
    ("data_efficiency", _is_on, "changes the batches while training", "delete it"),
    ("progressive_layer_drop", _is_on, "changes the model while training", "delete it"),
    ("compression_training", _is_present, "changes the model while training", "delete it"),
    ("quantize_training", _is_on, "changes the model while training", "delete it"),
    ("weight_quantization", _is_present, "changes the model's weights", "delete it"),
    ("eigenvalue", _is_on, "changes the model while training", "delete it"),
    ("sparse_attention", _is_present, "changes the model", "delete it"),
    ("elasticity", _is_on, "changes the effective batch", "delete it, and state N and B"),
    ("autotuning", _is_on, "runs other configs than this one", "delete it"),
    ("hybrid_engine", _is_on, "is for reinforcement learning, with an engine of its own", "delete it"),
    ("amp", _is_on, "needs Apex, and its loss scaling is outside DeepSpeed", 'write "bf16": {"enabled": true}'),
    ("pipeline", _is_present, "data parallelism only: a pipeline has micro-batches of its own", "delete it"),
    ("tensor_parallel", _is_present, "data parallelism only", "delete it"),
    ("expert_parallel", _is_present, "data parallelism only", "delete it"),
    ("sequence_parallel_size", _is_several, "data parallelism only: ranks would share samples", "delete it"),
    ("data_parallel_size", _is_present, "is the number of ranks, and set by the launcher", "delete it"),
    ("compile.deepcompile", _is_on, "replaces the backward pass, and is not supported here", "delete it"),
    (
        "zero_optimization.zenflow",
        _is_present,
        "delays parts of the update, so that no window is one step",
        "delete it",
    ),
    (
        "bf16.check_grad_overflow",
        _is_false,
        "lets one NaN micro-batch into every parameter at ZeRO 1 and 2",
        "delete it",
    ),
    ("gradient_predivide_factor", _is_no_divisor, "is divided by", "delete it, or write 1.0"),
    ("sparse_gradients", _is_on, "reduces embeddings differently from other parameters", "delete it"),
)

_GPU_ONLY_KEYS = (
    "aio.use_gds",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients",
)
_GPU_OPTIMIZERS = ("lion", "lamb", "onebitadam", "onebitlamb", "zerooneadam")
_OWN_SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_TORCH_ADAM = 'write "type": "AdamW" with "torch_adam": true in params'


def check_combinations(config: Mapping[str, Any], zero_stage: int, schema: DeepSpeedSchema) -> None:
    """Refuse what makes accumulation mean something else, and what this machine cannot run.

    Raises:
        ConfigError: the first one found, without a source.
    """
    for key, refuses, problem, fix in _REFUSED:
        value = look_up(config, key)
        if value is not None and refuses(value):
            shown = {} if isinstance(value, dict) else {"value": value}
            raise ConfigError(problem, key=key, fix=fix, **shown)
    for key in _GPU_ONLY_KEYS:
        if schema.machine.device == "cpu" and look_up(config, key):
            raise ConfigError("needs a GPU", key=key, value=True, fix="delete it")
    _check_offload(config.get("zero_optimization", {}), zero_stage)
    _check_optimizer_runs_here(config, schema.machine)
    _check_zero_knows_optimizer(config, zero_stage, schema)
    _check_torch_scheduler(config, zero_stage)


def look_up(config: Mapping[str, Any], dotted: str) -> Any:
    """The value at a dotted path, or None where there is nothing."""
    place: Any = config
    for key in dotted.split("."):
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def _offloads(section: Mapping[str, Any], what: str) -> bool:
    """Whether ``offload_optimizer`` or ``offload_param`` moves anything off the device."""
    target = section.get(what) or {}
    return target.get("device", "none") != "none"


def _check_offload(section: Mapping[str, Any], zero_stage: int) -> None:
    for what, lowest_stage in (("offload_optimizer", 1), ("offload_param", 3)):
        if not _offloads(section, what):
            continue
        key = f"zero_optimization.{what}"
        if zero_stage < lowest_stage:
            raise ConfigError(
                f"has no effect at ZeRO {zero_stage}", key=key, fix=f'write "stage": {lowest_stage}, or delete it'
            )
        if section[what]["device"] == "nvme" and not section[what].get("nvme_path"):
            raise ConfigError(
                "does not say where to", key=key, fix='write "nvme_path": "/a/local/folder", or "device": "cpu"'
            )


def is_compiled_here(config: Mapping[str, Any], machine: Machine) -> bool:
    """Whether DeepSpeed compiles the optimizer for the CPU before its first step."""
    name = config["optimizer"]["type"].lower()
    offloaded = _offloads(config.get("zero_optimization", {}), "offload_optimizer")
    compiled = (*ADAM_FAMILY, "muon", *(("lion", "adagrad") if offloaded else ()))
    torch_adam = look_up(config, "optimizer.params.torch_adam")
    return (offloaded or machine.device == "cpu") and name in compiled and not torch_adam


def _check_optimizer_runs_here(config: Mapping[str, Any], machine: Machine) -> None:
    name = config["optimizer"]["type"]
    if is_compiled_here(config, machine):
        if not machine.has_compiler:
            problem = "is compiled for the CPU by DeepSpeed, and there is no C++ compiler"
            raise ConfigError(problem, key="optimizer.type", value=name, fix=_TORCH_ADAM)
    elif machine.device == "cpu" and name.lower() in _GPU_OPTIMIZERS:
        raise ConfigError("has no CPU implementation", key="optimizer.type", value=name, fix=_TORCH_ADAM)


def _check_zero_knows_optimizer(config: Mapping[str, Any], zero_stage: int, schema: DeepSpeedSchema) -> None:
    name = config["optimizer"]["type"]
    is_torch_class = name.lower() not in schema.own_optimizers
    untested = is_torch_class and name not in schema.tested_with_zero
    if zero_stage > 0 and untested and not config.get("zero_allow_untested_optimizer", False):
        raise ConfigError(
            f"DeepSpeed refuses it at ZeRO {zero_stage} unless told otherwise",
            key="optimizer.type",
            value=name,
            fix='write "zero_allow_untested_optimizer": true at the top level',
        )


def _check_torch_scheduler(config: Mapping[str, Any], zero_stage: int) -> None:
    name = look_up(config, "scheduler.type")
    if zero_stage > 0 and name is not None and name not in _OWN_SCHEDULERS:
        problem = f"torch's schedulers take no ZeRO {zero_stage} optimizer"
        allowed = ", ".join(_OWN_SCHEDULERS)
        raise ConfigError(problem, key="scheduler.type", value=name, allowed=allowed, fix='write "WarmupDecayLR"')
