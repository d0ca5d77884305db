"""``no_sync`` and ``coalesce_grad_reduction`` with N > 1: ``engine.step()`` updates once in N windows.

Stepping inside either context raises, so there is one step for each window, and the engine counts step calls. What was
accumulated in the windows between is in that update too (``no_sync``), or lost (``coalesce_grad_reduction``).
Run: torchrun --nproc_per_node 1 one_step_a_window.py. SGD with a rate of 1 shows gradients as changes of the weight.
"""
# ruff: noqa: T201, D101, D102

import deepspeed
import torch

N = 4


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs * self.weight).sum()


def updates(context: str, inside: int) -> list[float]:
    """What each of 2 N windows adds to the weight, where 1 is right; ``inside`` micro-steps of N are in the context."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": N,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 64, "allgather_bucket_size": 64},
        "zero_allow_untested_optimizer": True,
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    seen, inputs = [], torch.ones(8, device=engine.device)
    for _ in range(2 * N):
        before = model.weight[0].item()
        with getattr(engine, context)():
            for _ in range(inside):
                engine.backward(engine(inputs))
        for _ in range(N - inside):
            engine.backward(engine(inputs))
        engine.step()
        seen.append(before - model.weight[0].item())
    return seen


for context, inside in (("no_sync", N - 1), ("coalesce_grad_reduction", N)):
    print(f"{context}: " + ", ".join(f"{update:.2f}" for update in updates(context, inside)))
