"""bf16 at ZeRO 0: the optimizer has made a step before training begins, so Adam's count is one ahead.

The wrapper makes an optimizer step with gradients of zero to create the optimizer's states. Adam's bias correction then
starts at count 2, and weight decay has acted once. ZeRO 1 to 3 are right.
Run: torchrun --nproc_per_node 1 empty_first_step.py. Adam's first update is its rate, whatever the gradient.
"""
# ruff: noqa: T201, D101, D102

import deepspeed
import torch

RATE = 0.125


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.weight).sum()


def first_update(stage: int) -> float:
    """Over the rate."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": RATE, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64, "allgather_bucket_size": 64},
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(8, dtype=torch.bfloat16, device=engine.device)))
    engine.step()
    return -model.weight[0].item() / RATE


for stage in (0, 1, 2):
    print(f"ZeRO {stage}: the first update is {first_update(stage):.3f} of the rate")
