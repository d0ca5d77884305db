"""An actor and a critic, each with an engine of its own, two forwards of the actor in each micro-step."""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from toy_data import Rows, gpt2, never_compile, save

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--mistake", default="")
parser.add_argument("--save", default="")
args = parser.parse_args()


def config(clipping: float) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": clipping,
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 100000},
    }


class Critic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 16), torch.nn.Tanh())
        self.head = torch.nn.Linear(16, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(tokens).mean(dim=1))


never_compile()
deepspeed.init_distributed()
actor_model, critic_model = gpt2(), Critic()
actor, *_ = deepspeed.initialize(model=actor_model, model_parameters=actor_model.parameters(), config=config(1.0))
critic, *_ = deepspeed.initialize(model=critic_model, model_parameters=critic_model.parameters(), config=config(0.0))

for batch in DataLoader(Rows(30), batch_size=2):
    tokens = batch["input_ids"]
    first = actor(input_ids=tokens, labels=batch["labels"]).loss
    second = actor(input_ids=tokens.flip(0), labels=batch["labels"].flip(0)).loss
    actor.backward((first + second) / 2)
    actor.step()
    good = (tokens.sum(dim=1) % 2).long()
    loss = F.cross_entropy(critic(tokens), good)
    critic.backward(loss / 3 if args.mistake == "critic-divided-twice" else loss)
    critic.step()
save(actor.module, args.save)
