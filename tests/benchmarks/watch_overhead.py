"""What a watch costs the steps that it does not look at: those before its window, and those after it.

Run: python tests/benchmarks/watch_overhead.py [--pairs 1000] [--stage 2] [--json OUT]

One process, two engines of the same model, of which the watch knows one; they step in turn, in alternating order, so
that whatever else the machine does hits both. Shown is the median over pairs of steps of watched over unwatched time,
with its 95 % interval (by order statistics). What the watch leaves on the process rather than on the engine, a function
at the steps of torch's optimizers until the script ends, is on both sides, and timed by itself.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from transformers import GPT2Config, GPT2LMHeadModel

from dsaccum.engine.process import Ranks, quiet_libraries, start_process_group
from dsaccum.watch.session import Session

N, WARM_UP = 2, 20


def engine_of(stage: int) -> Any:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": N,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def seconds_of_step(engine: Any, batches: list[torch.Tensor]) -> float:
    began = time.perf_counter()
    for tokens in batches:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return time.perf_counter() - began


def ratios(watched: Any, plain: Any, pairs: int) -> list[float]:
    found = []
    for pair in range(pairs):
        batches = [torch.randint(0, 256, (4, 32)) for _ in range(N)]
        order = (watched, plain) if pair % 2 else (plain, watched)
        taken = {id(engine): seconds_of_step(engine, batches) for engine in order}
        found.append(taken[id(watched)] / taken[id(plain)])
    return found


def median_and_interval(values: list[float]) -> tuple[float, float, float]:
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = math.floor(len(values) / 2 - half), math.ceil(len(values) / 2 + half)
    return statistics.median(ordered), ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


def shown(name: str, values: list[float]) -> dict[str, Any]:
    middle, low, high = median_and_interval(values)
    print(f"{name:7} the window: {middle:.4f} (95 %: {low:.4f} to {high:.4f})", flush=True)
    return {"ratio": middle, "interval": [low, high]}


def microseconds_of(work: Callable[[], object], times: int = 2000) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken)


def process_wide() -> float:
    """Microseconds that an optimizer's step takes longer with the watch's functions there."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with_watch = microseconds_of(optimizer.step)
    saved = [(hooks, dict(hooks)) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]
    for hooks, _ in saved:
        hooks.clear()
    without = microseconds_of(optimizer.step)
    for hooks, before in saved:
        hooks.update(before)
    return with_watch - without


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=1000, help="before the window, and as many after it")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    quiet_libraries()
    torch.set_num_threads(1)
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    start_process_group(Ranks(0, 1, 0, 1, launched=False), timedelta(seconds=60))
    plain = engine_of(arguments.stage)
    session = Session((WARM_UP + arguments.pairs + 3,))
    watched = engine_of(arguments.stage)
    ratios(watched, plain, WARM_UP)
    told: dict[str, Any] = {"zero_stage": arguments.stage, "pairs": arguments.pairs}
    told["before"] = shown("before", ratios(watched, plain, arguments.pairs))
    ratios(watched, plain, 5)  # the window begins with the second of them, and ends with the third
    if session.verdict != "equivalent":
        sys.exit("the window was not watched")
    told["after"] = shown("after", ratios(watched, plain, arguments.pairs))
    told["process_wide_us"] = process_wide()
    print(f"each step of an optimizer, whoever's: {told['process_wide_us']:.1f} microseconds")
    session.end()
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
