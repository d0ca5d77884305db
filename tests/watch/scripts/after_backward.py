"""A loop that multiplies all gradients after backward: GradScaler, or a sum of token losses divided by the tokens."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from toy_data import Rows, gpt2, save

parser = argparse.ArgumentParser()
parser.add_argument("--how", choices=["scaler", "tokens"], default="tokens")
parser.add_argument("--loss", choices=["tokens", "squares"], default="tokens", help="squares: no token can be read")
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--mistake", default="")
parser.add_argument("--save", default="")
args = parser.parse_args()
n, mistake = 4, args.mistake

model = gpt2(0.0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, enabled=args.how == "scaler")
batches = list(DataLoader(Rows(n * 5 * 2, ragged=True), batch_size=2))


def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = batch["labels"][:, 1:].flatten()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].flatten(0, 1)
    if args.loss == "squares":
        return logits[labels != -100].square().sum()
    return F.cross_entropy(logits, labels, reduction="sum")


spare = [0.9 * p.data for p in model.parameters()]


def swap() -> None:
    """Other weights, as for an evaluation, and back again."""
    for p, other in zip(model.parameters(), spare, strict=True):
        own = p.data.clone()
        p.data.copy_(other)
        other.copy_(own)


def clip() -> None:
    if args.clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)


def normalise(total: int) -> None:
    """What makes the gradient that of one batch."""
    if args.how == "scaler":
        scaler.unscale_(optimizer)
        return
    divisor = total / 2 if mistake == "half" else total
    for number, p in enumerate(model.parameters()):
        if p.grad is not None and not (mistake == "all-but-one" and number == 3):
            p.grad /= divisor


for start in range(0, len(batches), n):
    window = batches[start : start + n]
    total = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
    for k, batch in enumerate(window):
        if k == 2 and mistake in ("swapped", "swapped-back"):
            swap()
            if mistake == "swapped-back":
                swap()
        loss = loss_of(batch) / (total if args.how == "scaler" else 1)
        if mistake == "cleared":
            optimizer.zero_grad()
        scaler.scale(loss).backward()
    if mistake == "swapped":
        swap()
    if mistake == "clipped-first":
        clip()
        normalise(total)
    else:
        if args.clip or args.how == "tokens":
            normalise(total)  # without, scaler.step does it
        clip()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
save(model, args.save)
