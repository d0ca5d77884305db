"""A cell, or a user's JSON, as a small case: files as a user would write them, and DeepSpeed as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from dsaccum.audit.cells import ACCUMULATION_STEPS, Cell, Circumstances, OptimizerName, PrecisionName
from dsaccum.audit.models import SIZES
from dsaccum.audit.ways import WAYS, Way
from dsaccum.batch import MICRO_BATCH_KEY, STEPS_KEY
from dsaccum.config.precision import NumberFormat, Precision
from dsaccum.power.small_case import LENGTH, ROWS, write_lines, write_text
from dsaccum.verification.cases.arguments import VerifyArguments
from dsaccum.verification.cases.inputs import PreparedCase, read_case
from dsaccum.verification.cases.substitutions import verified_batch
from dsaccum.verification.verify import with_fault

CLIPPING_KEY: Final = "gradient_clipping"
CLIPPING: Final = 0.5
"""Below every norm of a gradient here, so that clipping acts; the norms are above 1.0, too, in some window of each."""
STEPS: Final = 2
"""As many updates as the claim about them needs."""
MOST_STEPS: Final = max(ACCUMULATION_STEPS)
_MODEL: Final = {"architecture": "gpt2", "config": SIZES}
_SCHEDULE: Final = {
    "type": "WarmupLR",
    "params": {"warmup_type": "linear", "warmup_min_lr": 3e-4, "warmup_max_lr": 3e-3, "warmup_num_steps": 10},
}
_ADAM: Final = {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
_AUTO: Final = {**_ADAM, "warmup_min_lr": 3e-4, "warmup_num_steps": 10, "gradient_clipping": CLIPPING}
"""For the JSON of a user's that leaves them open."""
_OPTIMIZERS: Final[dict[OptimizerName, dict[str, Any]]] = {
    "AdamW": {"type": "AdamW", "params": {"torch_adam": True, **_ADAM}},
    "FusedAdam": {"type": "AdamW", "params": _ADAM},
    "SGD": {"type": "SGD", "params": {"lr": 3e-3, "momentum": 0.9}},
}
_UNTESTED_WITH_ZERO: Final = ("SGD",)
"""DeepSpeed asks for a word of its own before it takes these at ZeRO 1 to 3."""
_PRECISIONS: Final[dict[PrecisionName, tuple[dict[str, Any], Precision, NumberFormat]]] = {
    "fp32": ({}, "fp32", "fp32"),
    "bf16": ({"bf16": {"enabled": True}}, "bf16", "bf16"),
    # A scale at which a small model's gradients do not overflow: a discarded window shows nothing.
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 8}}, "fp16", "fp16"),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "autocast bf16", "fp32"),
}
"""What the JSON holds, and what a case is told of it."""


def prepare_cell(cell: Cell, folder: Path, ranks: int) -> PreparedCase:
    """The cell as a case.

    Precision comes in after the JSON was read: our own loader refuses some of what DeepSpeed is to be tried with here.

    Args:
        cell: what is tried.
        folder: for its files; what is there is written over.
        ranks: W.

    Raises:
        ConfigError: so many ranks cannot run here.
    """
    section, precision, accumulation = _PRECISIONS[cell.circumstances.precision]
    prepared = _prepare(
        _config(cell.circumstances), WAYS[cell.way], folder, ranks, cell.circumstances.accumulation_steps
    )
    case = prepared.case
    changed = replace(case, config={**case.config, **section}, precision=precision, accumulation_dtype=accumulation)
    return replace(prepared, case=changed)


def prepare_own(config: Mapping[str, Any], way: Way, folder: Path, ranks: int) -> PreparedCase:
    """A user's JSON with the small model and micro-batch, and N = 4 where it accumulates, called in one of the ways.

    Args:
        config: the JSON.
        way: how DeepSpeed is called.
        folder: for the files.
        ranks: W.

    Raises:
        ConfigError: whatever is wrong with the JSON.
    """
    batch, _ = verified_batch(config, ranks, None, None)
    return _prepare(dict(config), way, folder, ranks, MOST_STEPS if batch.accumulation_steps > 1 else 1)


def _config(circumstances: Circumstances) -> dict[str, Any]:
    config: dict[str, Any] = {
        MICRO_BATCH_KEY: ROWS,
        STEPS_KEY: circumstances.accumulation_steps,
        "optimizer": _OPTIMIZERS[circumstances.optimizer],
        "scheduler": _SCHEDULE,
        "zero_optimization": {"stage": circumstances.zero_stage},
    }
    if circumstances.optimizer in _UNTESTED_WITH_ZERO:
        config["zero_allow_untested_optimizer"] = True
    if circumstances.clipping != "absent":
        config[CLIPPING_KEY] = {"off": 0.0, "on": CLIPPING}[circumstances.clipping]
    return config


def _prepare(config: dict[str, Any], way: Way, folder: Path, ranks: int, accumulation_steps: int) -> PreparedCase:
    """Read from files, and then left as DeepSpeed has it: no remedies.

    Left out, ``gradient_clipping`` means no clipping to a reader. Our loader wants it written; DeepSpeed gets what
    there was.
    """
    deepspeed, experiment = folder / "ds.json", folder / "experiment.yaml"
    deepspeed.write_text(json.dumps({CLIPPING_KEY: 0.0, **config}))
    data = _data(way, folder, ranks)
    experiment.write_text(yaml.safe_dump({"name": "audit", "model": _model(way), "data": data, "auto": _AUTO}))
    arguments = VerifyArguments(
        deepspeed, experiment, ranks=ranks, steps=STEPS, accumulation_steps=accumulation_steps, micro_batch=ROWS
    )
    prepared = with_fault(read_case(arguments), None)
    given = {key: value for key, value in prepared.case.config.items() if key != CLIPPING_KEY or CLIPPING_KEY in config}
    case = replace(prepared.case, config={**given, **way.config}, loop=way.loop, remedies=False)
    return replace(prepared, case=case)


def _model(way: Way) -> dict[str, Any]:
    return way.model if "factory" in way.model else {**_MODEL, **way.model}


def _data(way: Way, folder: Path, ranks: int) -> dict[str, Any]:
    data: dict[str, Any] = {"source": "files", "sequence_length": LENGTH}
    if way.rows == "packed":
        return data | {"files": [str(write_text(folder))]}
    if way.rows == "ragged":
        return data | {"files": [str(write_lines(folder))], "packing": "padded", "last_window": "continue"}
    epoch = MOST_STEPS * 5 // 2 * ranks * ROWS  # two windows and a half
    return data | {"files": [str(write_equal_lines(folder, epoch))], "packing": "padded", "last_window": "short"}


def write_equal_lines(folder: Path, rows: int) -> Path:
    """Documents that each fill one row; one in twenty is held out, so there are more of them than rows to train on."""
    path, words = folder / "equal.jsonl", write_text(folder).read_text()
    texts = [words[row * LENGTH :][: LENGTH - 1] for row in range(rows * 21 // 20)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path
