"""What a watch costs the steps that it does not look at: those before its window, and those after it.

Run: python tests/benchmarks/watch_overhead.py [--pairs 12] [--kind deepspeed|plain] [--stage 2] [--json OUT]

Pairs of processes run the same script, one of them under ``python -m dsaccum.watch``, in alternating order. Of each
process the median step before and after the window counts; of each pair the ratio, watched over unwatched. Shown is
the mean of the ratios with its 95 % interval (Student's t), in processor time of the process, which other work on the
machine disturbs less, and in wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
WINDOW, N = 20, 2
STUDENT = {3: 3.18, 5: 2.57, 7: 2.36, 9: 2.26, 11: 2.20, 15: 2.13, 19: 2.09, 23: 2.07}
"""97.5 % quantiles by degrees of freedom; between them the larger one is taken."""
CLOCKS: dict[str, Callable[[], float]] = {"processor": time.process_time, "wall": time.perf_counter}


def train(kind: str, stage: int, steps: int, out: str) -> None:
    """The script: optimizer steps of a GPT-2 of 0.9 million parameters, each timed from first forward to end."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2)
    )
    step = _plain_step(model) if kind == "plain" else _deepspeed_step(model, stage)
    taken: dict[str, list[float]] = {clock: [] for clock in CLOCKS}
    for _ in range(steps):
        began = {name: clock() for name, clock in CLOCKS.items()}
        step()
        for name, clock in CLOCKS.items():
            taken[name].append(clock() - began[name])
    Path(out).write_text(json.dumps(taken))


def batch() -> dict[str, object]:
    import torch

    tokens = torch.randint(0, 512, (4, 64))
    return {"input_ids": tokens, "labels": tokens}


def _plain_step(model: object) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        for _ in range(N):
            (model(**batch()).loss / N).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed_step(model: object, stage: int) -> Callable[[], None]:
    import deepspeed

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": N,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1_000_000},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        for _ in range(N):
            engine.backward(engine(**batch()).loss)
            engine.step()

    return step


def run(arguments: argparse.Namespace, *, watched: bool, folder: Path) -> dict[str, list[float]]:
    out = folder / "steps.json"
    words = [__file__, "--train", str(out), "--kind", arguments.kind, "--stage", str(arguments.stage)]
    words += ["--steps", str(arguments.steps)]
    command = ["-m", "dsaccum.watch", "--window", str(WINDOW), "--", *words] if watched else words
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    if ended.returncode or (watched and "RIGHT" not in ended.stderr):
        raise RuntimeError(ended.stderr[-2000:])
    taken: dict[str, list[float]] = json.loads(out.read_text())
    return taken


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def medians(taken: list[float]) -> dict[str, float]:
    """The first five steps are a warm-up; the window begins when the step before it has ended."""
    return {"before": statistics.median(taken[5 : WINDOW - 1]), "after": statistics.median(taken[WINDOW:])}


def interval(ratios: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    quantile = next(value for freedom, value in sorted(STUDENT.items(), reverse=True) if freedom <= len(ratios) - 1)
    return statistics.mean(ratios), quantile * statistics.stdev(ratios) / math.sqrt(len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--kind", choices=["deepspeed", "plain"], default="deepspeed")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.kind, arguments.stage, arguments.steps, arguments.train)
        return
    if arguments.pairs < 4:
        parser.error("an interval takes four pairs")
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for pair in range(arguments.pairs):
            order = (False, True) if pair % 2 else (True, False)
            found = {watched: run(arguments, watched=watched, folder=Path(name)) for watched in order}
            for clock in CLOCKS:
                plain, seen = medians(found[False][clock]), medians(found[True][clock])
                for part in plain:
                    ratios.setdefault(f"{clock}, {part}", []).append(seen[part] / plain[part])
                    seconds.setdefault(f"{clock}, {part}", []).append(plain[part])
            print(f"pair {pair + 1}: " + ", ".join(f"{name} {v[-1]:.4f}" for name, v in ratios.items()), flush=True)
    told = {}
    for name, values in ratios.items():
        mean, half = interval(values)
        told[name] = {"ratio": mean, "half_width": half, "unwatched_ms": 1e3 * statistics.median(seconds[name])}
        print(f"{name:20}: {mean:.4f} +- {half:.4f}   (step {told[name]['unwatched_ms']:.1f} ms)")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"kind": arguments.kind, "pairs": arguments.pairs, "ratios": told}, indent=1)
        )


if __name__ == "__main__":
    main()
