"""Trainer with the watch among its callbacks; what it finds is the script's own ``verdict`` and ``raised``."""

import argparse
import tempfile

from toy_data import Rows, llama, never_compile
from transformers import Trainer, TrainingArguments
from with_trainer import dividing_again, options

from dsaccum.watch.trainer import NotEquivalent, WatchCallback

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=-1, help="-1: without DeepSpeed")
parser.add_argument("--mistake", default="")
parser.add_argument("--fail", action="store_true")
parser.add_argument("--let-it-raise", action="store_true")
parser.add_argument("--late", action="store_true", help="added to a Trainer that is made")
parser.add_argument("--html", default=None)
args = parser.parse_args()

if args.stage >= 0:
    never_compile()
callback = WatchCallback(window=3, fail=args.fail, html=args.html)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(output_dir=folder, **options(args.stage, max_steps=4))
    kind = dividing_again(Trainer) if args.mistake == "divided-twice" else Trainer
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
