"""Hugging Face Trainer, with DeepSpeed or without, and mistakes that people make around it."""

import argparse
import tempfile

import torch
from toy_data import LoraLinear, Rows, gpt2, llama, never_compile, save
from transformers import Trainer, TrainerCallback, TrainingArguments
from with_trainer import dividing_again, options

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--model", choices=["gpt2", "llama"], default="llama")
parser.add_argument("--stage", type=int, default=-1, help="-1: without DeepSpeed")
parser.add_argument("--dtype", default="fp32")
parser.add_argument("--ragged", action="store_true")
parser.add_argument("--lora", action="store_true")
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--mend", action="store_true", help="count what the shift leaves")
parser.add_argument("--mistake", default="")
parser.add_argument("--save", default="")
args = parser.parse_args()


class MeanOfMeans(Trainer):
    """The model's own mean, as most overridden losses are."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        return loss if num_items_in_batch is None else loss / self.args.gradient_accumulation_steps


class IgnoresNumItems(Trainer):
    """Its signature says that it divides by num_items_in_batch."""

    def compute_loss(self, model, inputs, return_outputs=False, **keywords):
        return model(**inputs).loss


class InTheMiddle(TrainerCallback):
    def on_substep_end(self, arguments, state, control, model=None, optimizer=None, **_):
        if args.mistake == "zero-grad":
            model.zero_grad()
        if args.mistake == "clip-each":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


if args.stage >= 0:
    never_compile()
model = gpt2() if args.model == "gpt2" else llama()
if args.lora:
    LoraLinear.put_into(model)
kinds = {"divided-twice": dividing_again(Trainer), "mean-of-means": MeanOfMeans, "ignores-num-items": IgnoresNumItems}
kind = kinds.get(args.mistake, Trainer)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        eval_strategy="steps" if args.evaluate else "no",
        eval_steps=2,
        **options(args.stage, bf16=args.dtype == "bf16"),
    )
    rows = Rows(ragged=args.ragged, mask_padding=args.mistake != "padding-counted")
    if args.mend:
        rows.labels[:, 0] = -100
    trainer = kind(model, arguments, train_dataset=rows, eval_dataset=Rows(8), callbacks=[InTheMiddle()])
    trainer.train()
save(model, args.save)
