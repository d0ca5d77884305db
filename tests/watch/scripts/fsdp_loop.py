"""A loop under FSDP2 (``fully_shard``), with and without gradients that wait for the last micro-step."""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from toy_data import Rows, llama

parser = argparse.ArgumentParser()
parser.add_argument("--no-sync", action="store_true")
parser.add_argument("--ragged", action="store_true")
parser.add_argument("--mixed", action="store_true", help="a kind that is refused")
parser.add_argument("--mistake", default="")
parser.add_argument("--save", default="")
args = parser.parse_args()
mistake, n = args.mistake, 4

if not dist.is_initialized():
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = llama()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if args.mixed else MixedPrecisionPolicy()
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = Rows(n * 4 * 2 * world, ragged=args.ragged)
sampler = DistributedSampler(rows, world, rank, shuffle=False)
batches = list(DataLoader(rows, batch_size=2, sampler=sampler))

for start in range(0, len(batches), n):
    window = batches[start : start + n]
    targets = torch.tensor(float(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)))
    dist.all_reduce(targets)
    for k, batch in enumerate(window):
        last = k == n - 1
        model.set_requires_gradient_sync((last and mistake != "always-no-sync") or not args.no_sync)
        own = int((batch["labels"][:, 1:] != -100).sum())
        loss = model(**batch).loss
        if mistake == "mean-of-means":
            loss = loss / n
        else:
            loss = loss * own * world / float(targets)
        if mistake == "divided-twice":
            loss = loss / n
        loss.backward()
        if mistake == "clip-each":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
if args.save:
    named = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    torch.save(named, f"{args.save}.{rank}" if rank else args.save)
