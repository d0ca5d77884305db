"""A model whose gradient is its data, to the bit: what every parameter's reduced gradient must be is known by hand.

loss = sum over rows and parameters of <parameter, coefficients>. The gradient is the sum of the coefficients, whatever
the parameters are. They are integers from -2 to 2 and N W is a power of two, so each partial sum has at most 8
significant bits: exact in bf16 as in fp32, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SHAPES = {"table": (7, 5), "weight": (5, 5), "bias": (5,), "scale": (1,)}
"""35 + 25 + 5 + 1 = 66 elements; odd sizes, so that partitions cut through parameters and need padding."""
COLUMNS = 66
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
BF16_IN_FP32: dict[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
KINDS = {
    "fp32-0": (0, {}), "fp32-1": (1, {}), "fp32-2": (2, {}), "fp32-3": (3, {}),
    "bf16-0": (0, BF16), "bf16-1": (1, BF16), "bf16-2": (2, BF16), "bf16-3": (3, BF16),
    "bf16-fp32-1": (1, BF16_IN_FP32), "bf16-fp32-2": (2, BF16_IN_FP32), "bf16-fp32-3": (3, BF16_IN_FP32),
}  # fmt: skip
"""Every optimizer wrapper: name -> (ZeRO stage, precision)."""


class Ledger(nn.Module):
    """The four parameters, one of them tied to a second name; one frozen, one that no loss uses."""

    def __init__(self, *, oddities: bool = True) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            values = torch.arange(1, 1 + torch.Size(shape).numel()) / 8 + number
            self.register_parameter(name, nn.Parameter(values.view(shape)))
        if oddities:
            self.tied = self.table
            self.frozen = nn.Parameter(torch.full((3, 3), 7.0), requires_grad=False)
            self.unused = nn.Parameter(torch.full((3,), 5.0))

    def forward(self, coefficients: Tensor) -> Tensor:
        flat = torch.cat([getattr(self, name).reshape(-1) for name in SHAPES])
        return (flat * coefficients.to(flat.dtype).sum(0)).sum()


@dataclass(frozen=True)
class LedgerCase:
    kind: str
    accumulation_steps: int = 4
    clipping: float = 0.0
    optimizer: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    oddities: bool = True
    remedied: bool = True
    groups: int = 2
    zero: dict[str, Any] = field(default_factory=dict)


def coefficients(world_size: int, steps: int, window: int) -> Tensor:
    """[N, W, 1 row, 66 columns] of integers from -2 to 2."""
    random = torch.Generator().manual_seed(window)
    return torch.randint(-2, 3, (steps, world_size, 1, COLUMNS), generator=random)


def expected_gradient(world_size: int, steps: int, window: int) -> dict[str, Tensor]:
    """The mean over N and W of each micro-batch's gradient, by parameter, float64 and exact."""
    flat = coefficients(world_size, steps, window).double().sum((0, 1, 2)) / (steps * world_size)
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    return {name: part.view(SHAPES[name]) for name, part in zip(SHAPES, flat.split(sizes), strict=True)}


def start_engine(case: LedgerCase, world_size: int, client: Callable[..., Any] | None = None) -> Any:
    """A DeepSpeed engine over the ledger, in two parameter groups of different weight decay, or one of none."""
    import deepspeed

    from dsaccum.engine.remedies import apply_remedies

    stage, precision = KINDS[case.kind]
    model = Ledger(oddities=case.oddities)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.5, "name": "decayed"},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "name": "plain"},
    ]
    if case.groups == 1:
        groups = [{"params": [p for _, p in named]}]
    extra = {"torch_adam": True} if case.optimizer in ("Adam", "AdamW") else {}
    config = {
        "train_batch_size": case.accumulation_steps * world_size,
        "gradient_accumulation_steps": case.accumulation_steps,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": case.clipping,
        "optimizer": {"type": case.optimizer, "params": {"lr": 2.0**-6, **extra, **case.options}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 40, "allgather_bucket_size": 40,
            "stage3_param_persistence_threshold": 6, "stage3_prefetch_bucket_size": 40, **case.zero,
        },
        "timers": {"throughput": {"enabled": False}},
        **precision,
    }  # fmt: skip
    if client is not None:
        del config["optimizer"]
        engine = deepspeed.initialize(model=model, optimizer=client(groups), config=config)[0]
    else:
        engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
    if case.remedied:
        apply_remedies(engine)
    return engine


def run_window(engine: Any, rank: int, world_size: int, steps: int, window: int) -> None:
    for micro_batch in coefficients(world_size, steps, window)[:, rank]:
        engine.backward(engine(micro_batch))
        engine.step()
