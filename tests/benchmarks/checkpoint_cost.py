"""What a checkpoint costs beside DeepSpeed's own, and beside DeepSpeed's own made durable; in turn, in one process.

Run: python tests/benchmarks/checkpoint_cost.py [--rounds 15] [--width 512] [--stage 0]. Ours writes aside, waits for
the disk, keeps checksums, and renames. ``bare`` is ``engine.save_checkpoint``; ``durable`` calls fsync on each of its
files and directories afterwards. Each of the three then removes the one that it saved before, as ours does by itself;
figures are without that, and with it. Loading: ``engine.load_checkpoint`` of the
same files, with and without reading them once before to compare their checksums; with the files in the system's memory
(as after a kill), and not (as on another machine).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel

from dsaccum.batch import EffectiveBatch
from dsaccum.durable import make_durable, read_back
from dsaccum.engine.process import Ranks, limit_threads, quiet_libraries, start_process_group
from dsaccum.engine.state_files import TAG, load_state
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from dsaccum.training.checkpoints.manifest import Counters, Split, StreamOrigin
from dsaccum.training.checkpoints.saving import CheckpointWriter
from dsaccum.training.checkpoints.shelf import Checkpoint, Shelf
from dsaccum.training.opening import installed_versions

RATIOS = [
    ("ours", "bare"), ("ours", "durable"), ("ours + removing", "durable + removing"), ("checked load", "load"),
    ("cold checked load", "cold load"),
]  # fmt: skip


def build(width: int, stage: int) -> WindowEngine:
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=width, n_head=8, vocab_size=1024, n_positions=64))
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    engine = WindowEngine(model, config, EffectiveBatch(1, 1, 1), CausalLMLoss())
    tokens = model.dummy_inputs["input_ids"][:1]
    engine.run_window([{"input_ids": tokens, "labels": tokens}], tokens.numel() - 1)
    return engine


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def timed(work: Callable[[], object]) -> float:
    os.sync()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class TimedShelf(Shelf):
    """Knows how long removing took."""

    removing = 0.0

    def _remove(self, path: Path) -> None:
        started = time.perf_counter()
        super()._remove(path)
        self.removing += time.perf_counter() - started


class Saving:
    """The three ways to save.

    Attributes:
        seconds: by what was done, in the order of the rounds.
        shelf: of ours.
    """

    def __init__(self, engine: Any, folder: Path) -> None:
        self._engine, self._folder = engine, folder
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.shelf = TimedShelf(folder / "ours")
        self._writer = CheckpointWriter(
            engine, self.shelf, lambda: Split(world_size=1, accumulation_steps=1, micro_batch=1), StreamOrigin(), 1,
            installed_versions(), 0, lambda: 0, lambda: None,
        )  # fmt: skip

    def bare(self, number: int) -> None:
        self._measure("bare", number, self._save)

    def durable(self, number: int) -> None:
        def save(folder: Path) -> None:
            self._save(folder)
            for path in [*files_under(folder), folder / TAG, folder]:
                make_durable(path)

        self._measure("durable", number, save)

    def ours(self, number: int) -> None:
        self.shelf.removing = 0.0
        whole = timed(lambda: self._save_ours(number))
        self._note("ours", whole - self.shelf.removing, self.shelf.removing)

    def _measure(self, way: str, number: int, save: Callable[[Path], None]) -> None:
        new, old = (self._folder / f"{way}-{each}" for each in (number, number - 1))
        saving = timed(lambda: save(new))
        started = time.perf_counter()
        shutil.rmtree(old, ignore_errors=True)
        self._note(way, saving, time.perf_counter() - started)

    def _note(self, way: str, saving: float, removing: float) -> None:
        self.seconds[way].append(saving)
        self.seconds[f"{way} + removing"].append(saving + removing)

    def _save(self, folder: Path) -> None:
        self._engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)

    def _save_ours(self, number: int) -> None:
        saved = self._writer.save(Counters(step=number))
        assert saved.path is not None, saved.error


def measure_loading(engine: Any, checkpoint: Checkpoint, rounds: int, seconds: dict[str, list[float]]) -> None:
    """Into ``seconds``; the two orders take turns."""
    names = list(checkpoint.manifest.files)

    def load() -> None:
        load_state(engine, checkpoint.path, universal=False)

    def checked() -> None:
        assert [read_back(checkpoint.path / name) for name in names] == list(checkpoint.manifest.files.values())
        load()

    for number in range(rounds):
        ways = [("load", load), ("checked load", checked)]
        for way, work in reversed(ways) if number % 2 else ways:
            forget([checkpoint.path / name for name in names])
            seconds[f"cold {way}"].append(timed(work))
            seconds[way].append(timed(work))


def forget(paths: list[Path]) -> None:
    """The system keeps what it has read of them in memory; no longer."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_under(folder))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--stage", type=int, default=0)
    arguments = parser.parse_args()
    quiet_libraries()
    ranks = Ranks.from_environment()
    limit_threads(ranks)
    start_process_group(ranks, timedelta(seconds=60))
    engine = build(arguments.width, arguments.stage).engine
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        saving = Saving(engine, Path(name))
        ways = [saving.bare, saving.durable, saving.ours]
        for number in range(arguments.rounds + 1):
            for way in ways[number % 3 :] + ways[: number % 3]:
                way(number)
        seconds = {way: taken[1:] for way, taken in saving.seconds.items()}  # the first has nothing to remove
        (checkpoint,) = saving.shelf.newest_first()
        assert isinstance(checkpoint, Checkpoint)
        bare = size_of(Path(name) / f"bare-{arguments.rounds}")
        loading: dict[str, list[float]] = defaultdict(list)
        measure_loading(engine, checkpoint, arguments.rounds, loading)
        print(f"bytes: bare {bare:,}, ours {size_of(checkpoint.path):,}")
    show(seconds | loading, f"ZeRO {arguments.stage}, {arguments.rounds} rounds in turn; medians in seconds")


def show(seconds: dict[str, list[float]], title: str) -> None:
    print(title)
    for way, taken in seconds.items():
        print(f"{way:>18}  {statistics.median(taken):.3f}  ({min(taken):.3f} to {max(taken):.3f})")
    for one, other in RATIOS:
        ratio = statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))
        print(f"{one} / {other}: {ratio:.3f}")


if __name__ == "__main__":
    main()
