"""What the benchmarks share: sides that take turns, figures with their intervals, and one experiment for all sides."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dsaccum.config.deepspeed import DeepSpeedSettings, load_deepspeed_config
from dsaccum.config.experiment import Experiment
from dsaccum.config.loading import load_experiment
from dsaccum.engine.process import (
    Ranks,
    let_idle_threads_sleep,
    limit_threads,
    quiet_libraries,
    start_process_group,
)

REPOSITORY = Path(__file__).parents[2]
EXPERIMENT = REPOSITORY / "launch/experiments/stdlib-nano.yaml"
CONFIGS = REPOSITORY / "ds_configs"


@dataclass(frozen=True)
class Setup:
    """One experiment on this rank.

    Attributes:
        ranks: this process's place.
        threads: that torch computes with.
        source: the experiment's file.
        experiment: as read, with overrides.
    """

    ranks: Ranks
    threads: int
    source: Path
    experiment: Experiment

    @cached_property
    def data(self) -> Any:
        from dsaccum.data import load_data

        return load_data(self.experiment.data, self.source)

    def with_overrides(self, *overrides: str) -> Setup:
        """Another experiment on the same data."""
        other = replace(self, experiment=load_experiment(self.source, overrides))
        other.__dict__["data"] = self.data
        return other

    def settings(
        self, config: Path, accumulation_steps: int | None = None, micro_batch: int | None = None
    ) -> DeepSpeedSettings:
        from dsaccum.engine.schema import installed_schema

        return load_deepspeed_config(
            config, schema=installed_schema(), experiment=self.experiment, world_size=self.ranks.world_size,
            accumulation_steps=accumulation_steps, micro_batch=micro_batch,
        )  # fmt: skip

    def model(self) -> Any:
        """Equal weights each time."""
        from dsaccum.model import build_model

        return build_model(
            self.experiment.model, vocabulary_size=len(self.data.tokenizer),
            sequence_length=self.experiment.data.sequence_length, seed=0, end_token=self.data.tokenizer.end_token,
            pad_token=self.data.tokenizer.pad_token, source=self.source,
        )  # fmt: skip

    def stream(self, batch: Any) -> Any:
        """This rank's micro-batches of each window."""
        from dsaccum.data import WindowOrder, WindowStream

        order = WindowOrder(len(self.data.samples), batch.total, "continue", seed=0)
        return WindowStream(self.data.samples, order, batch, self.ranks.rank, self.data.tokenizer.pad_token)


def set_up(overrides: Sequence[str] = (), source: Path = EXPERIMENT) -> Setup:
    """Read the experiment and join the other ranks."""
    quiet_libraries()
    let_idle_threads_sleep()
    ranks = Ranks.from_environment()
    threads = limit_threads(ranks)
    experiment = load_experiment(source, overrides)
    start_process_group(ranks, timedelta(seconds=600))
    return Setup(ranks, threads, source, experiment)


def on_ranks(count: int) -> None:
    """Return on each of so many ranks: with several, the process that a person started ends here."""
    if count == 1 or "RANK" in os.environ:
        return
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    sys.exit(subprocess.run([*launcher, *sys.argv], env=environment).returncode)


class Turns:
    """Sides that take turns. All ranks begin and end a turn together; each round has an order of its own.

    Args:
        sides: what each does in its turn; None for a side that calls back (Hugging Face's Trainer owns its loop): its
            turn is when ``take`` hands over, and lasts until ``take`` is called again.

    Attributes:
        seconds: of each side's turns in the rounds that count.
    """

    def __init__(self, sides: Mapping[str, Callable[[int], None] | None]) -> None:
        self._sides = dict(sides)
        self.seconds: dict[str, list[float]] = {name: [] for name in self._sides}

    def take(
        self, windows: int, rounds: int, warm_up: int = 1, after_first: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Play all rounds; stops once for each window of the side that calls back.

        Args:
            windows: of each turn; a turn of the very first round is one window.
            rounds: that count.
            warm_up: rounds of whole turns before them, beside the very first one.
            after_first: called when each side has done one window.
        """
        draw = random.Random(0)  # the same orders on every rank
        for number in range(-1 - warm_up, rounds):
            first = number == -1 - warm_up
            for name in draw.sample(list(self._sides), len(self._sides)):
                began = _together()
                work, count = self._sides[name], 1 if first else windows
                if work is not None:
                    work(count)
                else:
                    for _ in range(count):
                        yield
                taken = _together() - began
                if number >= 0:
                    self.seconds[name].append(taken / count)
            if first:
                after_first()

    def play(self, windows: int, rounds: int, warm_up: int = 1) -> None:
        """All rounds, where no side calls back."""
        for _ in self.take(windows, rounds, warm_up):
            raise AssertionError("a side calls back")


def _together() -> float:
    """The time at which all ranks are here."""
    import torch.distributed as dist

    if dist.get_world_size() > 1:
        dist.barrier()
    return time.perf_counter()


def interval(values: Sequence[float], rounds: int = 10_000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def paired(one: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """The median of one / other over rounds, with its interval."""
    ratios = [a / b for a, b in zip(one, other, strict=True)]
    return {"ratio": round(statistics.median(ratios), 4), "interval_95": [round(end, 4) for end in interval(ratios)]}


def versions() -> dict[str, str]:
    """Of everything that a figure depends on."""
    from dsaccum.training.opening import installed_versions

    return {**installed_versions(), "accelerate": version("accelerate")}


def machine() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was."""
    return {"cores": len(os.sched_getaffinity(0)), "load_average": round(os.getloadavg()[0], 2)}


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout."""
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(_shown, row))
    console = Console(width=max(130, Console().width))
    console.print(title, highlight=False)
    console.print(table)


def _shown(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else f"{cell:,}" if isinstance(cell, int) else str(cell)


def tell(figures: Mapping[str, Any]) -> None:
    """One line of JSON, with versions and machine."""
    print(json.dumps({**figures, "machine": machine(), "versions": versions()}), flush=True)
