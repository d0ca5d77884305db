"""LoRA adapters of peft on a small Llama, trained by Hugging Face Trainer or by TRL's SFTTrainer."""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from toy_data import Rows, llama, never_compile, save
from transformers import Trainer, TrainingArguments
from with_trainer import dividing_again, options

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--trainer", choices=["hf", "sft"], default="hf")
parser.add_argument("--stage", type=int, default=-1, help="-1: without DeepSpeed")
parser.add_argument("--ragged", action="store_true")
parser.add_argument("--whole", action="store_true", help="no adapters")
parser.add_argument("--mistake", default="")
parser.add_argument("--save", default="")
args = parser.parse_args()

lora = None if args.whole else LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def kind_of(trainer: type) -> type:
    return dividing_again(trainer) if args.mistake == "divided-twice" else trainer


def hf_trainer(folder: str) -> Trainer:
    model = llama() if lora is None else get_peft_model(llama(), lora)
    arguments = TrainingArguments(output_dir=folder, **options(args.stage, bf16=False))
    return kind_of(Trainer)(model, arguments, train_dataset=Rows(ragged=args.ragged))


def sft_trainer(folder: str) -> Trainer:
    """On rows of tokens, so that there is nothing to tokenize; ragged ones are padded by TRL's own collator."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    rows = Rows(ragged=args.ragged)
    tokens = [row[mask == 1].tolist() for row, mask in zip(rows.tokens, rows.mask, strict=True)]
    words = {f"w{number}": number for number in range(64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w3")), pad_token="w0", eos_token="w2"
    )
    arguments = SFTConfig(
        output_dir=folder,
        max_length=None,
        gradient_checkpointing=False,
        **options(args.stage, bf16=False, remove_unused_columns=True),
    )
    return kind_of(SFTTrainer)(
        llama(),
        arguments,
        train_dataset=Dataset.from_dict({"input_ids": tokens}),
        processing_class=tokenizer,
        peft_config=lora,
    )


torch.manual_seed(0)
if args.stage >= 0:
    never_compile()
with tempfile.TemporaryDirectory() as folder:
    trainer = (hf_trainer if args.trainer == "hf" else sft_trainer)(folder)
    trainer.train()
save(trainer.model, args.save)
