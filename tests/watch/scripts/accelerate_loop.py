"""A loop with Accelerate, with DeepSpeed or without."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader
from toy_data import Rows, gpt2, never_compile, save

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=-1, help="-1: without DeepSpeed")
parser.add_argument("--ragged", action="store_true")
parser.add_argument("--mistake", default="")
parser.add_argument("--save", default="")
args = parser.parse_args()
mistake = args.mistake

plugin = None
if args.stage >= 0:
    never_compile()
    plugin = DeepSpeedPlugin(
        hf_ds_config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 100000},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        }
    )
accelerator = Accelerator(gradient_accumulation_steps=4, deepspeed_plugin=plugin)
model = gpt2()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Rows(40, ragged=args.ragged, mask_padding=mistake != "padding-counted"), batch_size=2)
if mistake == "unprepared":
    model, loader = accelerator.prepare(model, loader)
else:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        if mistake == "divided-twice":
            loss = loss / accelerator.gradient_accumulation_steps
        accelerator.backward(loss)
        if mistake == "clip-each":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        elif accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if mistake == "zero-grad":
            getattr(optimizer, "optimizer", optimizer).zero_grad()
save(accelerator.unwrap_model(model), args.save)
