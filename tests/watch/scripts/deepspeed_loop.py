"""A DeepSpeed loop as people write it, and the mistakes that they make in it."""

import argparse
import contextlib

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler
from toy_data import Rows, gpt2, never_compile, save

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--dtype", default="fp32")
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--updates", type=int, default=5)
parser.add_argument("--loss", choices=["model", "outside", "tokens"], default="model")
parser.add_argument("--ragged", action="store_true")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--offload", action="store_true", help="the optimizer, to the CPU")
parser.add_argument("--clipping", type=float, default=1.0)
parser.add_argument("--mistake", default="")
parser.add_argument("--save", default="")
args = parser.parse_args()
mistake = args.mistake

config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": args.accumulate,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "gradient_clipping": args.clipping,
    "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 100000},
    "bf16": {"enabled": args.dtype == "bf16"},
}
if args.offload:
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
never_compile()
model = gpt2(args.dropout)
deepspeed.init_distributed()
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

rank, world = dist.get_rank(), dist.get_world_size()
longer = args.accumulate if mistake == "step-every-nth" else 1
count = args.accumulate * args.updates * 2 * world * longer
rows = Rows(count, ragged=args.ragged, mask_padding=mistake != "padding-counted")
sampler = DistributedSampler(rows, world, 0 if mistake == "same-data" else rank, shuffle=False)
batches = list(DataLoader(rows, batch_size=2, sampler=sampler))
evaluation, kept = batches[0], []


def window_targets(step: int) -> int:
    window = batches[step // args.accumulate * args.accumulate :][: args.accumulate]
    count = torch.tensor(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window))
    dist.all_reduce(count)
    return int(count)


def loss_of(batch: dict[str, torch.Tensor], step: int) -> torch.Tensor:
    batch = {name: field.to(engine.device) for name, field in batch.items()}
    if args.loss == "model":
        return engine(**batch).loss
    labels = batch.pop("labels")
    logits = engine(**batch).logits[:, :-1].flatten(0, 1).float()
    if args.loss == "outside":
        return F.cross_entropy(logits, labels[:, 1:].flatten())
    if mistake == "before-shift":
        count = torch.tensor(
            sum(
                int((b["labels"] != -100).sum())
                for b in batches[step // args.accumulate * args.accumulate :][: args.accumulate]
            )
        )
        dist.all_reduce(count)
        targets = int(count)
    else:
        targets = window_targets(step)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") * args.accumulate * world / targets


for step, batch in enumerate(batches):
    loss = loss_of(batch, step)
    if mistake == "divided-twice":
        loss = loss / args.accumulate
    if mistake == "zero-grad":
        engine.optimizer.zero_grad()
    if step == 10:
        engine.eval()
        with torch.no_grad():
            engine(**{name: field.to(engine.device) for name, field in evaluation.items()})
        engine.train()
    if mistake == "short-window":  # an epoch is a window and a half
        engine.set_gradient_accumulation_boundary(step % 6 in (3, 5))
    last = step % args.accumulate == args.accumulate - 1
    with engine.no_sync() if mistake == "no-sync" else contextlib.nullcontext():
        engine.backward(loss, **({"retain_graph": True} if mistake == "keep-graphs" else {}))
    if mistake == "keep-graphs":
        kept.append(loss)
    if mistake == "reduce-each" and not last:
        engine.buffered_allreduce_fallback()
    if mistake == "reduce-by-hand" and not last:
        for parameter in engine.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
    if mistake == "clip-each":
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.05)
    if mistake != "step-every-nth" or last:
        engine.step()
if rank == 0:
    print("finished", engine.global_steps, flush=True)
save(engine.module, args.save)
