"""A plain loop whose model has two optimizers: one for embeddings, one for the rest."""

import argparse

import torch
from torch.utils.data import DataLoader
from toy_data import Rows, llama, save

parser = argparse.ArgumentParser()
parser.add_argument("--clip", choices=["", "together", "apart"], default="together")
parser.add_argument("--second-every", type=int, default=1, help="the second steps at every so many windows")
parser.add_argument("--clear-at-once", action="store_true", help="each after its own step")
parser.add_argument("--mistake", default="")
parser.add_argument("--save", default="")
args = parser.parse_args()
n, mistake, limit = 4, args.mistake, 0.1

model = llama()
rest = [p for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name]
ends = [p for name, p in model.named_parameters() if "embed" in name or "lm_head" in name]
first = torch.optim.AdamW(rest, lr=1e-3)
second = torch.optim.SGD(ends, lr=5e-2, momentum=0.9)
batches = list(DataLoader(Rows(n * 6 * 2), batch_size=2))


def clip() -> None:
    if args.clip == "together":
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    if args.clip == "apart":
        torch.nn.utils.clip_grad_norm_(rest, limit)
        torch.nn.utils.clip_grad_norm_(ends, limit / 2)
    if mistake == "shrunk":
        for p in ends:
            p.grad *= 0.5


for step, start in enumerate(range(0, len(batches), n)):
    for batch in batches[start : start + n]:
        (model(**batch).loss / n).backward()
    clip()
    optimizers = [first, second] if (step + 1) % args.second_every == 0 else [first]
    for optimizer in optimizers:
        optimizer.step()
        if args.clear_at_once and not (mistake == "never-cleared" and optimizer is second):
            optimizer.zero_grad()
    if not args.clear_at_once:
        for optimizer in optimizers:
            if not (mistake == "never-cleared" and optimizer is second):
                optimizer.zero_grad()
save(model, args.save)
