"""Whole verifications of small cases: input files as a user writes them, a run on shared ranks, a record that is read.

A case takes one to three seconds once its ranks are there: two layers of width 32, rows of 32 bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dsaccum import verify
from dsaccum.power.small_case import write_lines, write_text
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import VerifyRecord

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2},
    "llama": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2},
    "gpt_neox": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2},
    "qwen2": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2},
    "opt": {"num_hidden_layers": 2, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64,
            "num_attention_heads": 2},
}  # fmt: skip
"""Architecture -> its config, small."""
ADAMW = {"type": "AdamW", "params": {"torch_adam": True, "lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8,
                                     "weight_decay": 0.1}}  # fmt: skip
WARM_UP = {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_min_lr": 3e-4, "warmup_max_lr": 3e-3,
                                          "warmup_num_steps": 10}}  # fmt: skip
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


@dataclass(frozen=True)
class Given:
    """What is verified, in the words of the two files; ``experiment`` and ``config`` override whole top-level parts.

    Attributes:
        last_window: ``short`` puts the epoch's short window into the second step of a ragged case.
        packed_last_window: the same of a packed case.
    """

    architecture: str = "gpt2"
    ranks: int = 1
    micro_steps: int = 3
    rows: int = 2
    stage: int = 0
    precision: str = "fp32"
    ragged: bool = False
    length: int = 32
    clipping: float = 0.1
    """Below every norm of a gradient, so that it acts."""
    optimizer: dict[str, Any] = field(default_factory=lambda: ADAMW)
    scheduler: dict[str, Any] | None = field(default_factory=lambda: WARM_UP)
    last_window: str = "short"
    packed_last_window: str = "continue"
    seed: int = 0
    experiment: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """The DeepSpeed JSON and the experiment, with its data, in new files."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": self.micro_steps,
            "gradient_clipping": self.clipping,
            "optimizer": self.optimizer,
            "zero_optimization": {"stage": self.stage},
            **PRECISIONS[self.precision],
        }
        if "Adam" not in self.optimizer["type"]:
            config["zero_allow_untested_optimizer"] = True  # DeepSpeed asks for it at ZeRO 1 and up
        if self.scheduler is not None:
            config["scheduler"] = self.scheduler
        data = write_lines(folder) if self.ragged else write_text(folder)
        packing = {"packing": "padded", "last_window": self.last_window}
        packing = packing if self.ragged else {"last_window": self.packed_last_window}
        experiment = {
            "name": "small",
            "model": {"architecture": self.architecture, "config": MODELS[self.architecture]},
            "data": {
                "source": "files",
                "files": [str(data)],
                "sequence_length": self.length,
                "seed": self.seed,
                **packing,
            },
            "run": {"seed": self.seed},
            **self.experiment,
        }
        config |= self.config
        deepspeed, yaml_file = folder / "ds.json", folder / "experiment.yaml"
        deepspeed.write_text(json.dumps(config))
        yaml_file.write_text(yaml.safe_dump(experiment))
        return deepspeed, yaml_file

    def verify(self, folder: Path, pools: RankPools, **options: Any) -> VerifyRecord:
        """The record of it, whatever the verdict."""
        deepspeed, experiment = self.write(folder)
        return verify(deepspeed, experiment=experiment, ranks=self.ranks, pools=pools, **options)


def found(record: VerifyRecord) -> str:
    """What a failed assertion should show."""
    causes = [(cause.id, cause.confidence, cause.summary) for cause in record.causes]
    return f"{record.verdict}: {record.claims.which('fail')} {record.reasons} {causes}"
