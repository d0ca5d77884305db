"""ZeRO 1 and 2: with two ``engine.backward`` calls for one ``engine.step``, only the window's last call counts.

Every backward call of the last micro-step is taken for the end of the window: the second one begins a new sum, and all
that came before it is gone, the earlier micro-steps too.
Run: torchrun --nproc_per_node 1 two_backwards.py. SGD with a rate of 1 shows the gradient as the change of the weight.
"""
# ruff: noqa: T201, D101, D102

import deepspeed
import torch

N = 4


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2 * N))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.weight).sum()


def gradient(stage: int) -> torch.Tensor:
    """Backward call number k has a gradient of N in element k alone, so that every element of the mean is 1."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": N,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64, "allgather_bucket_size": 64},
        "zero_allow_untested_optimizer": True,
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    one_hot = N * torch.eye(2 * N, device=engine.device)
    for micro_step in range(N):
        engine.backward(engine(one_hot[2 * micro_step]))
        engine.backward(engine(one_hot[2 * micro_step + 1]))
        engine.step()
    return -model.weight.detach()


for stage in (0, 1, 2):
    arrived = ", ".join(f"{share + 0.0:.2f}" for share in gradient(stage).tolist())
    print(f"ZeRO {stage}: of {2 * N} backward calls arrived {arrived}")
