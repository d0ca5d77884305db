"""A parameter that no forward uses is changed by weight decay; ``torch.optim.AdamW`` leaves it alone.

DeepSpeed puts zeros where there is no gradient, and AdamW decays what has a gradient.
Run: torchrun --nproc_per_node 1 decay_without_gradient.py.
"""
# ruff: noqa: T201, D101, D102, D103

import deepspeed
import torch


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.ones(8))
        self.waiting = torch.nn.Parameter(torch.ones(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.used).sum()


OPTIONS = {"lr": 0.1, "weight_decay": 0.5}


def with_deepspeed(stage: int) -> float:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, **OPTIONS}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64, "allgather_bucket_size": 64},
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(8, device=engine.device)))
    engine.step()
    return model.waiting[0].item()


def with_torch() -> float:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    model(torch.ones(8)).backward()
    optimizer.step()
    return model.waiting[0].item()


print(f"torch: {with_torch():.3f}")
for stage in (0, 1, 2):
    print(f"ZeRO {stage}: {with_deepspeed(stage):.3f}")
