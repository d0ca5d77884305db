"""A small case in any setting, made of files as a user would write them: two layers of width 32 on rows of 32 bytes.

With ragged rows the second step trains on an epoch's last window, which is short.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

from dsaccum.power.settings import Setting
from dsaccum.verification.cases.arguments import VerifyArguments

STEPS, ROWS, LENGTH = 3, 2, 32
CLIPPING = 0.1
"""Below every norm of a gradient, so that clipping acts."""
_MODEL = {"architecture": "gpt2", "config": {"n_layer": 2, "n_embd": 32, "n_head": 2, "resid_pdrop": 0.1}}
"""It ties weights, and has dropout, which is set to 0."""
_OPTIMIZER = {
    "type": "AdamW",
    "params": {"torch_adam": True, "lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
}
_SCHEDULE = {
    "type": "WarmupLR",
    "params": {"warmup_type": "linear", "warmup_min_lr": 3e-4, "warmup_max_lr": 3e-3, "warmup_num_steps": 10},
}


def write_case(folder: Path, setting: Setting) -> VerifyArguments:
    """Write the DeepSpeed JSON, the experiment and its data into the folder.

    Args:
        folder: an own one for each setting.
        setting: what is run.
    """
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": setting.accumulation_steps,
        "gradient_clipping": CLIPPING,
        "optimizer": _OPTIMIZER,
        "scheduler": _SCHEDULE,
        "zero_optimization": {"stage": setting.zero_stage},
    }
    data: dict[str, Any] = {"source": "files", "sequence_length": LENGTH}
    if setting.packing == "packed":
        data["files"] = [str(write_text(folder))]
    else:
        data |= {"files": [str(write_lines(folder))], "packing": "padded", "last_window": "short"}
    deepspeed, experiment = folder / "ds.json", folder / "experiment.yaml"
    deepspeed.write_text(json.dumps(config))
    experiment.write_text(yaml.safe_dump({"name": "faults", "model": _MODEL, "data": data}))
    return VerifyArguments(deepspeed, experiment, ranks=setting.ranks, steps=STEPS)


def write_text(folder: Path) -> Path:
    """Some kilobytes of words."""
    path = folder / "text.txt"
    path.write_text(" ".join(_words(random.Random(0), 4_000)))
    return path


def write_lines(folder: Path) -> Path:
    """Short documents of 1 to 60 characters, most shorter than a row; 251 of them, so that no window divides."""
    path, draw = folder / "lines.jsonl", random.Random(0)
    texts = (" ".join(_words(draw, 12))[: draw.randint(1, 60)] for _ in range(251))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _words(draw: random.Random, count: int) -> list[str]:
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz.,()=", k=draw.randint(1, 9))) for _ in range(count)]
