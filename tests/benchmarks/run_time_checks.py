"""What the checks of a running training cost: the finite check at every step, the replica check at every 100th.

Run: python tests/benchmarks/run_time_checks.py [--windows 20] [--config ds_configs/accum4.json]

One process, one engine: a window is trained, then both checks are timed on the same engine, in turn. Shares are medians
of check over medians of window; the replica check's is divided by ``run.replica_check_every``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from dsaccum.config.deepspeed import load_deepspeed_config
from dsaccum.config.loading import load_experiment
from dsaccum.data import WindowOrder, WindowStream, load_data
from dsaccum.engine.gradients import gradient_norm
from dsaccum.engine.process import Ranks, limit_threads, quiet_libraries, start_process_group
from dsaccum.engine.schema import installed_schema
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.instruments.replicas import parameter_checksums
from dsaccum.loss import CausalLMLoss, window_count
from dsaccum.model import build_model
from dsaccum.training.opening import installed_versions
from dsaccum.training.replica_check import digest_of

REPOSITORY = Path(__file__).parents[2]


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "ds_configs/accum4.json")
    parser.add_argument("--experiment", type=Path, default=REPOSITORY / "launch/experiments/stdlib-nano.yaml")
    arguments = parser.parse_args()

    quiet_libraries()
    ranks = Ranks.from_environment()
    threads = limit_threads(ranks)
    experiment = load_experiment(arguments.experiment)
    settings = load_deepspeed_config(arguments.config, schema=installed_schema(), experiment=experiment, world_size=1)
    data = load_data(experiment.data, arguments.experiment)
    start_process_group(ranks, timedelta(seconds=120))
    model = build_model(
        experiment.model, vocabulary_size=len(data.tokenizer), sequence_length=experiment.data.sequence_length, seed=0,
        end_token=data.tokenizer.end_token, pad_token=data.tokenizer.pad_token, source=arguments.experiment,
    )  # fmt: skip
    order = WindowOrder(len(data.samples), settings.batch.total, "continue", seed=0)
    stream = WindowStream(data.samples, order, settings.batch, ranks.rank, data.tokenizer.pad_token)
    engine = WindowEngine(model, dict(settings.config), settings.batch, CausalLMLoss())

    taken: dict[str, list[float]] = {"window": [], "finite_check": [], "replica_check": []}
    for index in range(arguments.windows + 1):
        micro_batches = stream.window(index)
        targets = window_count(engine.loss, micro_batches)
        window = seconds_of(lambda: engine.run_window(micro_batches, targets))  # noqa: B023  (called at once)
        # DeepSpeed has cleared the gradients: parameters are as many and as large.
        for parameter in model.parameters():
            parameter.grad = parameter.detach()
        finite = seconds_of(lambda: math.isfinite(float(gradient_norm(model.parameters()))))
        for parameter in model.parameters():
            parameter.grad = None
        replica = seconds_of(lambda: digest_of(parameter_checksums(engine.engine)))
        if index:  # the first is a warm-up
            for name, seconds in zip(taken, (window, finite, replica), strict=True):
                taken[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    every = experiment.run.replica_check_every
    shares = {
        "finite_check": medians["finite_check"] / medians["window"],
        "replica_check": medians["replica_check"] / medians["window"] / every,
    }
    print(
        json.dumps(
            {
                "median_seconds": {name: round(seconds, 5) for name, seconds in medians.items()},
                "share_of_step_time": {name: round(share, 6) for name, share in shares.items()},
                "both": round(sum(shares.values()), 6),
                "replica_check_every": every,
                "windows": arguments.windows,
                "threads": threads,
                "versions": installed_versions(),
            }
        )
    )


if __name__ == "__main__":
    main()
