"""What a checkpoint costs beside DeepSpeed's own, and beside DeepSpeed's own made durable; in turn, in one process.

Run: python tests/benchmarks/checkpoint_cost.py [--rounds 15] [--width 512] [--stage 0]. Ours writes aside, waits for
the disk, keeps checksums, and renames. ``bare`` is ``engine.save_checkpoint``; ``durable`` calls fsync on each of its
files and directories afterwards. Loading: ``engine.load_checkpoint`` of the same files, with and without reading them
once before to compare their checksums.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

from transformers import GPT2Config, GPT2LMHeadModel

from dsaccum.batch import EffectiveBatch
from dsaccum.durable import make_durable, read_back
from dsaccum.engine.process import Ranks, limit_threads, quiet_libraries, start_process_group
from dsaccum.engine.state_files import TAG, load_state
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from dsaccum.training.checkpoints.manifest import Counters, Split, StreamOrigin
from dsaccum.training.checkpoints.saving import CheckpointWriter
from dsaccum.training.checkpoints.shelf import Shelf
from dsaccum.training.opening import installed_versions


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


def timed(work: Callable[[], None]) -> float:
    os.sync()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


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
    engine = build(arguments.width, arguments.stage)
    seconds: dict[str, list[float]] = {name: [] for name in ("bare", "durable", "ours", "load", "checked load")}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        shelf = Shelf(folder / "ours")
        writer = CheckpointWriter(
            engine.engine, shelf, Split(world_size=1, accumulation_steps=1, micro_batch=1), StreamOrigin(), 1,
            installed_versions(), 0, lambda: 0, lambda: None,
        )  # fmt: skip

        def bare() -> None:
            engine.engine.save_checkpoint(str(folder / "bare"), tag=TAG, save_latest=False)

        def durable() -> None:
            bare()
            for path in [*files_under(folder / "bare"), folder / "bare" / TAG, folder / "bare"]:
                make_durable(path)

        for round_number in range(arguments.rounds):
            ways: list[tuple[str, Callable[[], None]]] = [
                ("bare", bare), ("durable", durable), ("ours", partial(_saved, writer, round_number))
            ]  # fmt: skip
            for way, work in ways[round_number % 3 :] + ways[: round_number % 3]:
                shutil.rmtree(folder / "bare", ignore_errors=True)
                seconds[way].append(timed(work))
        (checkpoint,) = shelf.newest_first()
        size = sum(path.stat().st_size for path in files_under(checkpoint.path))
        for _ in range(arguments.rounds):
            check = timed(lambda: [read_back(checkpoint.path / name) for name in checkpoint.manifest.files])
            load = timed(lambda: load_state(engine.engine, checkpoint.path, universal=False))
            seconds["load"].append(load)
            seconds["checked load"].append(load + check)
    print(f"{size / 1e6:.1f} MB, ZeRO {arguments.stage}, {arguments.rounds} rounds in turn; medians in seconds")
    for way, taken in seconds.items():
        print(f"{way:>13}  {statistics.median(taken):.3f}  ({min(taken):.3f} to {max(taken):.3f})")
    for one, other in (("ours", "bare"), ("ours", "durable"), ("checked load", "load")):
        ratio = statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))
        print(f"{one} / {other}: {ratio:.3f}")


def _saved(writer: CheckpointWriter, step: int) -> None:
    saved = writer.save(Counters(step=step))
    assert saved.path is not None, saved.error


if __name__ == "__main__":
    main()
