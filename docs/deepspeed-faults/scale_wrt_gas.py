"""``engine.backward(loss, scale_wrt_gas=False)`` divides by gradient_accumulation_steps all the same.

At ZeRO 0, and at ZeRO 1 in bf16 accumulated in fp32, if ``loss`` is the very tensor that the engine returned.
Run: torchrun --nproc_per_node 1 scale_wrt_gas.py. SGD with a rate of 1 shows the gradient as the change of the weight.
"""
# ruff: noqa: T201, D101, D102

from typing import Any

import deepspeed
import torch

N = 4


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.weight).sum()


def gradient(stage: int, precision: dict[str, Any], copied: bool) -> float:
    """Of N micro-batches whose gradients are 1/N each: the user has divided already, and 1 is right."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": N,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64, "allgather_bucket_size": 64},
        "zero_allow_untested_optimizer": True,
        **precision,
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    inputs = torch.full((8,), 1 / N, dtype=model.weight.dtype, device=engine.device)
    for _ in range(N):
        loss = engine(inputs)
        engine.backward(loss * 1.0 if copied else loss, scale_wrt_gas=False)
        engine.step()
    return -model.weight[0].item()


BF16_IN_FP32 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
for stage, precision in ((0, {}), (1, {}), (2, {}), (1, BF16_IN_FP32), (2, BF16_IN_FP32)):
    for copied in (False, True):
        name = "bf16 accumulated in fp32" if precision else "fp32"
        handed = "loss * 1.0" if copied else "loss as the engine returned it"
        print(f"ZeRO {stage}, {name}, {handed}: {gradient(stage, precision, copied):.2f} of the right gradient")
