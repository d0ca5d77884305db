"""Throughput against a bare DeepSpeed loop: the same model, data, config and number of windows, in alternating pairs.

Run: python tests/benchmarks/throughput.py [--pairs 60] [--windows 2] [--config ds_configs/accum4.json]

Both sides run in this process, each with an engine of its own, and take turns; which goes first alternates. A pair's
ratio is (bare seconds) / (ours); its 95 % interval is a bootstrap over pairs. The bare side does what a tutorial does
and no more: forward, mean loss, backward, step; its micro-batches lie ready in memory. Ours counts targets, agrees on
them, builds each batch, looks for NaN, computes the gradient norm, and writes metrics.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import deepspeed
import torch.nn.functional as F

from dsaccum.config.deepspeed import load_deepspeed_config
from dsaccum.config.loading import load_experiment
from dsaccum.data import WindowOrder, WindowStream, load_data
from dsaccum.engine.process import Ranks, limit_threads, quiet_libraries, start_process_group
from dsaccum.engine.schema import installed_schema
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from dsaccum.model import build_model
from dsaccum.training.control import ControlExchange
from dsaccum.training.loop import TrainingLoop
from dsaccum.training.metrics import MetricsFile
from dsaccum.training.opening import installed_versions
from dsaccum.training.stop_request import StopRequest
from dsaccum.training.watchdog import Watchdog

REPOSITORY = Path(__file__).parents[2]


def bare_windows(engine, windows) -> None:
    for micro_batches in windows:
        for batch in micro_batches:
            logits = engine(input_ids=batch["input_ids"]).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
            engine.backward(loss)
            engine.step()


def interval(ratios: list[float], rounds: int = 10_000) -> tuple[float, float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "ds_configs/accum4.json")
    parser.add_argument("--experiment", type=Path, default=REPOSITORY / "launch/experiments/stdlib-nano.yaml")
    arguments = parser.parse_args()

    quiet_libraries()
    ranks = Ranks.from_environment()
    threads = limit_threads(ranks)
    experiment = load_experiment(arguments.experiment)
    settings = load_deepspeed_config(
        arguments.config, schema=installed_schema(), experiment=experiment, world_size=ranks.world_size
    )
    data = load_data(experiment.data, arguments.experiment)
    start_process_group(ranks, timedelta(seconds=120))

    def model():
        return build_model(
            experiment.model, vocabulary_size=len(data.tokenizer), sequence_length=experiment.data.sequence_length,
            seed=0, end_token=data.tokenizer.end_token, pad_token=data.tokenizer.pad_token, source=arguments.experiment,
        )  # fmt: skip

    order = WindowOrder(len(data.samples), settings.batch.total, "continue", seed=0)
    stream = WindowStream(data.samples, order, settings.batch, ranks.rank, data.tokenizer.pad_token)
    ready = [stream.window(index) for index in range(arguments.windows)]

    bare_model = model()
    bare, *_ = deepspeed.initialize(
        model=bare_model, model_parameters=list(bare_model.parameters()), config=dict(settings.config)
    )
    ours = WindowEngine(model(), dict(settings.config), settings.batch, CausalLMLoss())
    folder = Path(tempfile.mkdtemp())
    metrics = MetricsFile(folder / "metrics.jsonl")
    loop = TrainingLoop(
        engine=ours, stream=stream,
        exchange=ControlExchange(ranks.rank, ours.device),
        watchdog=Watchdog(ranks, 600, stop := StopRequest()).start(), stop=stop, record=metrics.write,
        note=lambda line: None,
    )  # fmt: skip

    def run(side: str) -> float:
        started = time.perf_counter()
        if side == "bare":
            bare_windows(bare, ready)
        else:
            loop.run(arguments.windows, max_skipped=1)
        return time.perf_counter() - started

    run("bare"), run("ours")  # warm-up
    ratios = []
    for pair in range(arguments.pairs):
        sides = ["bare", "ours"] if pair % 2 == 0 else ["ours", "bare"]
        seconds = {side: run(side) for side in sides}
        ratios.append(seconds["bare"] / seconds["ours"])
        if ranks.is_first:
            print(f"pair {pair + 1:>2}: bare {seconds['bare']:.3f} s, ours {seconds['ours']:.3f} s, {ratios[-1]:.4f}")
    low, high = interval(ratios)
    if ranks.is_first:
        print(
            json.dumps(
                {
                    "ratio_median": round(statistics.median(ratios), 4),
                    "interval_95": [round(low, 4), round(high, 4)],
                    "pairs": arguments.pairs,
                    "windows_per_side": arguments.windows,
                    "config": arguments.config.name,
                    "threads": threads,
                    "ranks": ranks.world_size,
                    "versions": installed_versions(),
                }
            )
        )


if __name__ == "__main__":
    main()
