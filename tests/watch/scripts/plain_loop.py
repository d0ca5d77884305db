"""A loop of plain PyTorch, on one process or under DDP, with and without no_sync."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from toy_data import Rows, gpt2, save

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--no-sync", action="store_true")
parser.add_argument("--ragged", action="store_true")
parser.add_argument("--loss", choices=["model", "tokens"], default="model")
parser.add_argument("--z-loss", type=float, default=0.0, help="with --loss tokens")
parser.add_argument("--rows", type=int, default=0, help="of an epoch; 0: enough for all updates")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--prompt", type=int, default=0, help="first tokens of each row without a label")
parser.add_argument("--mistake", default="")
parser.add_argument("--save", default="")
args = parser.parse_args()
mistake, n = args.mistake, args.accumulate

world = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0))
if world > 1 and not dist.is_initialized():
    dist.init_process_group("gloo")
model = gpt2(args.dropout)
if args.checkpointing:
    model.gradient_checkpointing_enable()
if args.compile:
    model = torch.compile(model, backend="aot_eager")
module = model
if world > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = Rows(args.rows or n * 5 * 2 * world, ragged=args.ragged, mask_padding=mistake != "padding-counted")
sampler = DistributedSampler(rows, world, 0 if mistake == "same-data" else rank, shuffle=False)
rows.labels[:, : args.prompt] = -100
if mistake == "shuffled-apart":  # each rank draws from all rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(rank)).tolist()
    rows, sampler = torch.utils.data.Subset(rows, order), None
batches = list(DataLoader(rows, batch_size=2, sampler=sampler))


kept: list[torch.Tensor] = []


def targets(window: list[dict[str, torch.Tensor]]) -> float:
    counted = [
        batch["attention_mask"] if mistake == "prompts-counted" else batch["labels"][:, 1:] != -100 for batch in window
    ]
    count = torch.tensor(float(sum(int(each.sum()) for each in counted)))
    if world > 1:
        dist.all_reduce(count)
    return float(count)


def update() -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


for _ in range(1 if not args.rows else 3):
    for start in range(0, len(batches), n):
        window = batches[start : start + n]
        total = targets(window)
        for k, batch in enumerate(window):
            last = k == len(window) - 1
            quiet = args.no_sync and world > 1 and (not last or mistake == "always-no-sync")
            with model.no_sync() if quiet else contextlib.nullcontext():
                batch = dict(batch)
                if args.loss == "tokens":
                    labels = batch.pop("labels")
                    logits = model(**batch).logits[:, :-1].flatten(0, 1)
                    loss = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") * world / total
                    if args.z_loss:
                        squares = args.z_loss * logits.logsumexp(-1)[labels[:, 1:].flatten() != -100].square()
                        by_means = mistake == "z-loss-mean"
                        loss = loss + (squares.mean() / n if by_means else squares.sum() * world / total)
                else:
                    output = model(**batch)
                    if mistake == "keep-logits":
                        kept.append(output.logits.detach())
                    loss = output.loss / (n if mistake == "full-divisor" or not args.rows else len(window))
                if mistake == "divided-twice":
                    loss = loss / n
                if mistake == "not-divided":
                    loss = loss * n
                if mistake == "zero-grad":
                    optimizer.zero_grad()
                loss.backward(retain_graph=mistake == "keep-graphs")
                if mistake != "keep-logits":
                    kept.append(loss)
            if mistake == "clip-each":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if mistake == "step-each":
                update()
            if mistake == "swapped" and k in (1, n - 1):  # other weights for an evaluation, taken back too late
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.mul_(2.0 if k == 1 else 0.5)
        if mistake != "step-each":
            update()
save(module, args.save)
