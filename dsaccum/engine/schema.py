"""The schema of the JSON, asked of the installed DeepSpeed itself, so that no list of keys can go stale.

DeepSpeed has no list of its keys. Its parser is therefore run on a dict that remembers what it was asked for, with
which default. Sections that have a pydantic model bring their fields along.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any, Literal

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.utils import logger
from pydantic import BaseModel

from dsaccum.config.schema import CallSchema, DeepSpeedSchema, Machine, SectionSchema

_SECTION_MODELS = {
    "zero_optimization": "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
    "fp16": "deepspeed.runtime.precision_config:DeepSpeedFP16Config",
    "bf16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "tensorboard": "deepspeed.monitor.config:TensorBoardConfig",
    "wandb": "deepspeed.monitor.config:WandbConfig",
    "csv_monitor": "deepspeed.monitor.config:CSVConfig",
    "comet": "deepspeed.monitor.config:CometConfig",
    "comms_logger": "deepspeed.comm.config:CommsLoggerConfig",
    "timers.throughput": "deepspeed.utils.config:DeepSpeedThroughputTimerConfig",
    "compile": "deepspeed.compile.config:CompileConfig",
    "hybrid_engine": "deepspeed.runtime.config:HybridEngineConfig",
}

# Asked for only when the section is switched on, so the remembering dict does not see them.
_WRITTEN_DOWN: dict[str, dict[str, Any]] = {
    "optimizer": {"type": None, "params": {}, "legacy_fusion": False},
    "scheduler": {"type": None, "params": {}},
    "fp16": {
        "enabled": False,
        "auto_cast": False,
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
        "fp16_master_weights_and_grads": False,
    },
    "bf16": {"enabled": False, "immediate_grad_update": False},
    "checkpoint.writer": {},
}

# Read by deepspeed.initialize before its parser runs.
_READ_ELSEWHERE: dict[str, Any] = {"sequence_parallel_size": 1, "data_parallel_size": None}

_OWN_OPTIMIZER_CLASSES = {
    "adam": ("deepspeed.ops.adam:FusedAdam", "deepspeed.ops.adam:DeepSpeedCPUAdam"),
    "adamw": ("deepspeed.ops.adam:FusedAdam", "deepspeed.ops.adam:DeepSpeedCPUAdam"),
    "adagrad": ("torch.optim:Adagrad",),
    "lamb": ("deepspeed.ops.lamb:FusedLamb",),
    "lion": ("deepspeed.ops.lion:FusedLion", "deepspeed.ops.lion:DeepSpeedCPULion"),
    "onebitadam": ("deepspeed.runtime.fp16.onebit.adam:OnebitAdam",),
    "onebitlamb": ("deepspeed.runtime.fp16.onebit.lamb:OnebitLamb",),
    "zerooneadam": ("deepspeed.runtime.fp16.onebit.zoadam:ZeroOneAdam",),
    "muadam": ("mup:MuAdam",),
    "muadamw": ("mup:MuAdamW",),
    "musgd": ("mup:MuSGD",),
}

# Taken out of `params` before the optimizer's class sees them; Muon splits one set between two optimizers.
_POPPED_ADAM_PARAMETERS: dict[str, Any] = {"torch_adam": False, "adam_w_mode": True, "fp32_optimizer_states": None}
_MUON_PARAMETERS: dict[str, Any] = {
    "lr": 1e-3,
    "momentum": 0.95,
    "weight_decay": 0.0,
    "ns_method": None,
    "muon_lr": None,
    "adam_lr": None,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
}

# Need a Python object, or a metric at every step: neither can stand in a JSON.
_NOT_FOR_JSON = {"LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"}


@functools.cache
def installed_schema() -> DeepSpeedSchema:
    """The JSON as the installed DeepSpeed reads it, and what this machine can run."""
    top_level, sections = _observed_keys()
    removed = getattr(importlib.import_module("deepspeed.runtime.config"), "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})
    # The older name of "bf16" would still be read; two names for one thing are one too many.
    hidden = {*removed, "bfloat16"}
    known = {key: default for key, default in (top_level | _READ_ELSEWHERE).items() if key not in hidden}
    own = {name: call for name in DEEPSPEED_OPTIMIZERS if (call := _own_optimizer(name)) is not None}
    torch_optimizers = dict(_classes_in(torch.optim, torch.optim.Optimizer))
    return DeepSpeedSchema(
        version=deepspeed.__version__,
        top_level=SectionSchema(known),
        sections=sections,
        removed=removed,
        own_optimizers=own,
        torch_optimizers={name: _call_schema(cls) for name, cls in torch_optimizers.items()},
        tested_with_zero=frozenset(name for name, cls in torch_optimizers.items() if _is_tested_with_zero(cls)),
        schedulers=_schedulers(),
        machine=this_machine(),
        rehearse=rehearse,
    )


def this_machine() -> Machine:
    """Device, compiler and fp16, as DeepSpeed would find them."""
    accelerator = get_accelerator()
    device: Literal["cpu", "cuda"] = "cuda" if accelerator.device_name() == "cuda" else "cpu"
    compilers = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    return Machine(
        device=device,
        has_compiler=any(shutil.which(name) for name in compilers if name),
        # Some CPUs have fp16 instructions and DeepSpeed then says yes; what it makes of them was never measured.
        supports_fp16=device == "cuda" and accelerator.is_fp16_supported(),
    )


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """DeepSpeed's logger comments on every parse and every new scheduler; a rehearsal is no news."""
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@_silence()
def rehearse(config: dict[str, Any], updates: int) -> list[float]:
    """Let DeepSpeed parse a resolved config, and run its scheduler on one dummy parameter.

    Args:
        config: without ``"auto"``; it is not changed.
        updates: how many optimizer steps to look ahead.

    Returns:
        The learning rate of each of them; empty when the optimizer has no ``lr`` and there is no scheduler.

    Raises:
        Exception: whatever DeepSpeed's parser, or the optimizer's or the scheduler's class, has against it.
    """
    parsed = copy.deepcopy(config)
    parsed.pop("train_batch_size", None)  # DeepSpeed would check it against a world that isn't there yet
    DeepSpeedConfig(parsed)
    weight = torch.nn.Parameter(torch.zeros(1, 1))
    weight.grad = torch.ones_like(weight)
    name, parameters = config["optimizer"]["type"], config["optimizer"].get("params", {})
    if name.lower() in DEEPSPEED_OPTIMIZERS:
        # Its own classes may need a GPU or a compiler; what they share with torch's AdamW is tried, the rest is not.
        shared = {key: parameters[key] for key in ("lr", "betas", "eps", "weight_decay") if key in parameters}
        if parameters.get("torch_adam"):
            shared = {key: value for key, value in parameters.items() if key not in _POPPED_ADAM_PARAMETERS}
            shared.pop("bias_correction", None)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW([weight], **shared)
    else:
        optimizer = getattr(torch.optim, name)([weight], **parameters)
    scheduler = _build_scheduler(config.get("scheduler"), optimizer)
    rates = []
    for _ in range(updates):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return rates


def _build_scheduler(section: dict[str, Any] | None, optimizer: torch.optim.Optimizer) -> Any:
    if section is None:
        return None
    name = section["type"]
    cls = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name)
    return cls(optimizer, **section.get("params", {}))


class _AskedKeys(dict[str, Any]):
    """A dict that remembers which keys it was asked for, and with which default."""

    def __init__(self, content: dict[str, Any] | None = None) -> None:
        super().__init__(content or {})
        self.asked: dict[str, Any] = {}

    def get(self, key: str, default: Any = None) -> Any:
        if self.asked.get(key) is None:
            self.asked[key] = default
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), None)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.setdefault(key, None)
        return super().__getitem__(key)

    def keys(self) -> Any:
        # DeepSpeed writes `key in config.keys()` as often as `key in config`.
        return self

    def __copy__(self) -> _AskedKeys:
        return self


@_silence()
def _observed_keys() -> tuple[dict[str, Any], dict[str, SectionSchema]]:
    """What DeepSpeed's parser asks for: the top-level keys, and those of every nested object."""
    nested = {
        "activation_checkpointing": _AskedKeys(),
        "aio": _AskedKeys(),
        "checkpoint": _AskedKeys({"parallel_write": _AskedKeys(), "writer": _AskedKeys()}),
        "data_types": _AskedKeys(),
        "flops_profiler": _AskedKeys(),
        "optimizer": _AskedKeys(),
        "scheduler": _AskedKeys(),
        "timers": _AskedKeys({"throughput": {}}),
        "torch_autocast": _AskedKeys(),
    }
    counts = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    whole = _AskedKeys({**counts, **nested})
    DeepSpeedConfig(whole)
    sections = {name: asked.asked | _WRITTEN_DOWN.get(name, {}) for name, asked in nested.items()}
    for name in ("parallel_write", "writer"):
        sections[f"checkpoint.{name}"] = nested["checkpoint"][name].asked
    schemas = {
        name: SectionSchema(defaults) for name, defaults in sections.items() if name.split(".")[0] in whole.asked
    }
    for name, location in _SECTION_MODELS.items():
        if (model := _imported(location)) is not None:
            schemas[name] = _model_schema(model)
        elif name in whole.asked:
            schemas[name] = SectionSchema(_WRITTEN_DOWN.get(name, {}))
    return whole.asked, schemas


def _model_schema(model: type[BaseModel]) -> SectionSchema:
    fields = model.model_fields.items()
    return SectionSchema({field.alias or name: field.get_default() for name, field in fields}, model)


def _own_optimizer(name: str) -> CallSchema | None:
    """Parameters that DeepSpeed's optimizer takes: those of whichever class it chooses; None where it cannot be had."""
    if name == "muon":
        return CallSchema(_MUON_PARAMETERS | _POPPED_ADAM_PARAMETERS)
    classes = [cls for location in _OWN_OPTIMIZER_CLASSES.get(name, ()) if (cls := _imported(location)) is not None]
    if not classes:
        return None
    defaults: dict[str, Any] = {}
    for cls in classes:
        defaults |= _call_schema(cls).defaults
    return CallSchema(defaults | _POPPED_ADAM_PARAMETERS if name in ("adam", "adamw") else defaults)


def _schedulers() -> dict[str, CallSchema]:
    torch_classes = dict(_classes_in(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler))
    own_classes = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    classes = {name: cls for name, cls in torch_classes.items() if name not in _NOT_FOR_JSON} | own_classes
    return {name: _call_schema(cls) for name, cls in classes.items()}


def _classes_in(module: Any, base: type) -> Iterator[tuple[str, type]]:
    for name, cls in vars(module).items():
        if inspect.isclass(cls) and issubclass(cls, base) and cls is not base and not name.startswith("_"):
            yield name, cls


def _call_schema(cls: Callable[..., Any]) -> CallSchema:
    handed_over = ("self", "params", "model_params", "optimizer", "last_epoch", "last_batch_iteration", "adamw_mode")
    parameters = [
        parameter
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if name not in handed_over and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return CallSchema(
        defaults={each.name: each.default for each in parameters if each.default is not each.empty},
        required=frozenset(each.name for each in parameters if each.default is each.empty),
    )


def _is_tested_with_zero(cls: type) -> bool:
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    return cls in ZERO_SUPPORTED_OPTIMIZERS


def _imported(location: str) -> Any:
    """The class at ``module:name``, or None where this installation has no such thing."""
    module_name, _, name = location.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name, None)
    except ImportError:
        return None
