"""ZeRO 1 and 2: ``engine.scale(loss).backward()`` divides by N twice where the model returns its logits too.

The documentation says that it gives the same gradients as ``engine.backward(loss)``.
Run: torchrun --nproc_per_node 1 scaled_backward.py. SGD with a rate of 1 shows gradients as changes of the weight.
"""
# ruff: noqa: T201, D102

import deepspeed
import torch

N = 4


class Model(torch.nn.Module):
    """As most models of transformers: the loss comes from logits that are returned beside it."""

    def __init__(self, with_logits: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))
        self.with_logits = with_logits

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = inputs * self.weight
        return (logits.sum(), logits) if self.with_logits else (logits.sum(),)


def gradient(stage: int, with_logits: bool) -> torch.Tensor:
    """Of N micro-batches whose gradients are 1 each: the mean is 1."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": N,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64, "allgather_bucket_size": 64},
        "zero_allow_untested_optimizer": True,
    }
    model = Model(with_logits)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(N):
        loss = engine(torch.ones(8, device=engine.device))[0]
        engine.scale(loss).backward()
        engine.step()
    return -model.weight.detach()


for stage in (1, 2):
    for with_logits in (False, True):
        share = gradient(stage, with_logits)[0].item()
        print(f"ZeRO {stage}, {'loss and logits' if with_logits else 'loss alone'}: {share:.4f} of the right gradient")
