"""Starting the real command, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TRAIN = REPOSITORY / "launch" / "train.py"
ACCUM4 = REPOSITORY / "ds_configs" / "accum4.json"
TINY_MODEL = "model.config={num_hidden_layers: 1, num_attention_heads: 2, hidden_size: 16, intermediate_size: 64}"
TINY = ["--set", TINY_MODEL, "--set", "data.sequence_length=32", "--set", "auto.warmup_num_steps=1"]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def said(self) -> str:
        return self.stdout + self.stderr

    @property
    def errors(self) -> list[str]:
        """Our own error lines."""
        return [line for line in self.said.splitlines() if line.startswith("error")]


def environment(**changes: str) -> dict[str, str]:
    """This environment without any launcher's marks, with one thread per rank: tests share the cores."""
    outer = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    return {**outer, "OMP_NUM_THREADS": "1", **changes}


def environment_of_a_user() -> dict[str, str]:
    """As ``environment``, with all cores."""
    return {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}


def train_command(
    *flags: str, ranks: int | None, deepspeed: Path | str = ACCUM4, port: int = 0, script: Path = TRAIN
) -> list[str]:
    """``ranks=None``: python alone, no launcher, which is quicker. No preflight unless the flags ask for it."""
    off = () if "--preflight" in flags else ("--preflight", "off")
    words = [str(script), "--deepspeed", str(deepspeed), *flags, *off]
    if ranks is None:
        return [sys.executable, *words]
    launcher = str(Path(sys.executable).parent / "deepspeed")
    return [launcher, "--num_gpus", str(ranks), "--master_port", str(port or free_port()), *words]


def run_train(
    *flags: str,
    cwd: Path,
    ranks: int | None = None,
    deepspeed: Path | str = ACCUM4,
    env: dict[str, str] | None = None,
    script: Path = TRAIN,
) -> Ended:
    command = train_command(*flags, ranks=ranks, deepspeed=deepspeed, script=script)
    started = time.monotonic()
    ended = subprocess.run(
        command, cwd=cwd, env=env or environment(), capture_output=True, text=True, timeout=240, check=False
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr, time.monotonic() - started)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
