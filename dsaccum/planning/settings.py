"""From a DeepSpeed JSON to the engine that DeepSpeed would make of it, without DeepSpeed.

The training command reads the JSON strictly; here only that is looked at which memory depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from dsaccum.config.combinations import look_up
from dsaccum.config.errors import ConfigError
from dsaccum.config.optimizer import check_gradient_clipping
from dsaccum.config.precision import Numerics, number_format, resolve_numerics
from dsaccum.config.schema import Machine
from dsaccum.planning.engines.bf16_optimizer import BF16Optimizer
from dsaccum.planning.engines.engine import Engine
from dsaccum.planning.engines.layout import ITEM_SIZES, Device, Layout
from dsaccum.planning.engines.partitioned import Partitioned
from dsaccum.planning.engines.sharded import Sharded
from dsaccum.planning.engines.unpartitioned import HalfFused, HalfUnfused, Unpartitioned
from dsaccum.planning.optimizers import Use, is_fused_adam, optimizer_use

_DEFAULTS: Final = {
    "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "sub_group_size": 1_000_000_000,
}
"""DeepSpeed's own (``DeepSpeedZeroConfig``), in elements."""

_NOT_MODELLED: Final = (
    ("zero_optimization.offload_optimizer", "delete it"),
    ("zero_optimization.offload_param", "delete it"),
    ("zero_optimization.zenflow", "delete it"),
    ("zero_optimization.zero_quantized_weights", "delete it"),
    ("zero_optimization.zero_quantized_gradients", "delete it"),
    ("compile.deepcompile", "delete it"),
    ("bf16.immediate_grad_update", "delete it"),
    ("bf16.bf16_master_weights_and_grads", "delete it"),
    ("fp16.fp16_master_weights_and_grads", "delete it"),
)
_SECTIONS: Final = ("zero_optimization", "bf16", "fp16", "torch_autocast", "data_types", "optimizer", "compile")
_LOWERED_BY_AUTOCAST: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""``LOWER_PRECISION_SAFE_MODULES``: ZeRO reduces the gradients of exactly these classes in autocast's type."""


@dataclass(frozen=True)
class EngineSettings:
    """What a JSON says about memory.

    Attributes:
        config: the JSON.
        zero: its ``zero_optimization``.
        stage: 0 to 3.
        numerics: precision of forward and backward, and what gradients add up in.
        device: where it would run.
        use: what the optimizer needs.
    """

    config: Mapping[str, Any]
    zero: Mapping[str, Any]
    stage: int
    numerics: Numerics
    device: Device
    use: Use

    @classmethod
    def of(cls, config: Mapping[str, Any], device: Device) -> EngineSettings:
        """Read them.

        Raises:
            ConfigError: a value is none, or its memory is not known here; without a source.
        """
        for section in _SECTIONS:
            if not isinstance(config.get(section, {}), dict):
                raise ConfigError(
                    "is no object", key=section, value=config[section], fix=f'delete it, or "{section}": {{}}'
                )
        zero = config.get("zero_optimization", {})
        stage = zero.get("stage", 0)
        if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
            raise ConfigError("is no ZeRO stage", key="zero_optimization.stage", value=stage, allowed="0, 1, 2 or 3")
        for key, fix in _NOT_MODELLED:
            if (value := look_up(config, key)) and (not isinstance(value, dict) or value.get("device") != "none"):
                raise ConfigError("its memory is not known here", key=key, fix=fix)
        if zero.get("contiguous_gradients") is False:
            key = "zero_optimization.contiguous_gradients"
            raise ConfigError("its memory is not known here", key=key, value=False, fix="delete it")
        if "type" not in config.get("optimizer", {}):
            fix = 'write "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": true}}'
            raise ConfigError("is missing", key="optimizer.type", fix=fix)
        check_gradient_clipping(config)
        numerics = resolve_numerics(config, stage, Machine(device, has_compiler=True, supports_fp16=device == "cuda"))
        use = optimizer_use(config["optimizer"], device)
        use((1,))  # refuses here, while the file's name is still known
        settings = cls(config, zero, stage, numerics, device, use)
        for name in _DEFAULTS:
            settings._elements(name)
        return settings

    @property
    def weights(self) -> str:
        """The number format of the parameters."""
        return "fp32" if self.numerics.precision.startswith("autocast") else self.numerics.precision

    @property
    def reduce_bucket_bytes(self) -> int:
        """Of one bucket, in the weights' format; none at ZeRO 0, nor in BF16_Optimizer."""
        reduces = self.stage > 1 or (self.stage == 1 and not self._is_bf16_optimizer)
        return self._elements("reduce_bucket_size") * ITEM_SIZES[self.weights] if reduces else 0

    @property
    def overlaps(self) -> bool:
        """``overlap_comm``."""
        return bool(self.zero.get("overlap_comm", False))

    @property
    def _is_bf16_optimizer(self) -> bool:
        return self.stage == 1 and (self.weights, self.numerics.accumulation) == ("bf16", "fp32")

    def engine(self, model: nn.Module, world_size: int, rank: int) -> Engine:
        """The engine of one rank, as ``DeepSpeedEngine._configure_optimizer`` chooses its wrapper."""
        layout = self.layout(model, world_size, rank)
        if self.stage == 3:
            return Sharded(layout)
        if self._is_bf16_optimizer:
            return BF16Optimizer(layout)
        if self.stage in (1, 2):
            return Partitioned(layout)
        if self.weights == "fp32":
            return Unpartitioned(layout)
        return HalfFused(layout) if layout.fused_adam else HalfUnfused(layout)

    def layout(self, model: nn.Module, world_size: int, rank: int) -> Layout:
        """Model and config, as far as memory goes."""
        sizes = _sizes_of(model)
        return Layout(
            trained=sizes.trained,
            frozen=sizes.frozen,
            of_module=sizes.of_module,
            stage=self.stage,
            precision=self.weights,
            accumulation=self.numerics.accumulation,
            communication=self._communication(model, sizes),
            world_size=world_size,
            rank=rank,
            device=self.device,
            clipping=self.config["gradient_clipping"] not in (0, "auto"),
            fused_adam=is_fused_adam(self.config["optimizer"]),
            reduce_bucket=self._elements("reduce_bucket_size"),
            overlaps=self.overlaps,
            scatters=bool(self.zero.get("reduce_scatter", True)),
            prefetch=self._elements("stage3_prefetch_bucket_size"),
            max_live=self._elements("stage3_max_live_parameters"),
            max_reuse=self._elements("stage3_max_reuse_distance"),
            persistence=self._elements("stage3_param_persistence_threshold"),
            sub_group=self._elements("sub_group_size"),
            optimizer=self.use,
        )

    def _elements(self, name: str) -> int:
        value = self.zero.get(name, "auto")
        if value == "auto":
            return _DEFAULTS[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError("is no number of elements", key=f"zero_optimization.{name}", value=value, fix="delete it")
        return int(value)

    def _communication(self, model: nn.Module, sizes: _Sizes) -> dict[int, str]:
        """``communication_data_type``, else the weights' own; under autocast ZeRO lowers the layers that it lowers."""
        stated = self.config.get("communication_data_type")
        format_ = self.weights if stated is None else number_format("communication_data_type", stated)
        formats = dict.fromkeys(sizes.trained, str(format_))
        if self.stage > 0 and self.numerics.precision.startswith("autocast"):
            lower = self.numerics.precision.removeprefix("autocast ")
            for number, module in enumerate(model.modules()):
                if type(module) in _LOWERED_BY_AUTOCAST:
                    formats |= {p: lower for p in sizes.of_module[number] if p in sizes.trained}
        return formats


@dataclass(frozen=True)
class _Sizes:
    """Of a model: elements of each trained parameter and of all that are not, and which parameters a module has."""

    trained: Mapping[int, int]
    frozen: int
    of_module: Mapping[int, list[int]]


@functools.lru_cache(maxsize=2)
def _sizes_of(model: nn.Module) -> _Sizes:
    """Every way of running asks for them, and a large model takes a while to walk through."""
    parameters = list(model.parameters())
    index = {id(parameter): number for number, parameter in enumerate(parameters)}
    return _Sizes(
        trained={number: p.numel() for number, p in enumerate(parameters) if p.requires_grad},
        frozen=sum(p.numel() for p in parameters if not p.requires_grad) + sum(b.numel() for b in model.buffers()),
        of_module={
            number: [index[id(parameter)] for parameter in module.parameters(recurse=False)]
            for number, module in enumerate(model.modules())
        },
    )
