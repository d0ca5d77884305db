"""Trainer with the watch among its callbacks; what it finds is the script's own ``verdict`` and ``raised``."""

import argparse
import tempfile

from toy_data import Rows, llama, never_compile
from transformers import Trainer, TrainingArguments

from dsaccum.watch.trainer import NotEquivalent, WatchCallback

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=-1, help="-1: without DeepSpeed")
parser.add_argument("--mistake", default="")
parser.add_argument("--fail", action="store_true")
parser.add_argument("--let-it-raise", action="store_true")
parser.add_argument("--late", action="store_true", help="added to a Trainer that is made")
parser.add_argument("--html", default=None)
args = parser.parse_args()


class DividesAgain(Trainer):
    def compute_loss(self, model, inputs, *arguments, **keywords):
        return super().compute_loss(model, inputs, *arguments, **keywords) / self.args.gradient_accumulation_steps


deepspeed_config = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 100000},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}
if args.stage >= 0:
    never_compile()
callback = WatchCallback(window=3, fail=args.fail, html=args.html)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=4,
        learning_rate=1e-3,
        use_cpu=True,
        deepspeed=deepspeed_config if args.stage >= 0 else None,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    kind = DividesAgain if args.mistake == "divided-twice" else Trainer
    trainer = kind(llama(), arguments, train_dataset=Rows(), callbacks=[] if args.late else [callback])
    if args.late:
        trainer.add_callback(callback)
    raised = ""
    try:
        trainer.train()
    except NotEquivalent as error:
        raised = str(error)
        if args.let_it_raise:
            raise
    finally:
        if callback.session is not None:
            callback.session.end()
