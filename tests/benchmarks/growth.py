"""What growth costs: an optimizer step over N, over W, over the model's size; the first step and verify over its size.

Run: python tests/benchmarks/growth.py --over N       # 1, 2, 4, ..., 64 at a fixed micro-batch: seconds, bytes reduced
     python tests/benchmarks/growth.py --over W       # 1 and 2 ranks, one thread each, N and B fixed
     python tests/benchmarks/growth.py --over model   # widths
     python tests/benchmarks/growth.py --over start   # widths; seconds until training's first step is done
     python tests/benchmarks/growth.py --over verify  # widths; seconds of ``dsaccum verify --full-size``
Each with [--rounds R] [--config ds_configs/accum4.json]. What is compared takes turns, in one process (N, model) or in
processes of its own (W, start, verify); ratios are of pairs of a round, with a 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import Process, rounds_of, seconds_until, training, wall_seconds
from side_by_side import CONFIGS, EXPERIMENT, Turns, on_ranks, paired, set_up, show, tell

STEPS, WIDTHS, RANKS = (1, 2, 4, 8, 16, 32, 64), (64, 128, 256, 512), (1, 2)
MICRO_STEPS_OF_A_TURN = 16
LONG = "run.steps=10000"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--over", choices=["N", "W", "model", "start", "verify"], required=True)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--config", type=Path, default=CONFIGS / "accum4.json")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--ranks", type=int, default=1, help="of --over N")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--measure-here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    over = {"N": over_steps, "W": over_ranks, "model": over_model, "start": over_start, "verify": over_verify}
    if arguments.measure_here:
        measure_here(arguments)
    else:
        over[arguments.over](arguments)


def over_steps(arguments: argparse.Namespace) -> None:
    on_ranks(arguments.ranks)
    from sides import Ours

    setup = set_up([*arguments.set, LONG])
    rounds, micro_batch = arguments.rounds or 10, setup.settings(arguments.config).batch.micro_batch
    sides = {steps: Ours(setup, setup.settings(arguments.config, steps, micro_batch)) for steps in STEPS}
    # A short window is measured by several, so that turns are about equally long.
    times = {steps: max(1, MICRO_STEPS_OF_A_TURN // steps) for steps in STEPS}
    turns = Turns({str(steps): lambda count, s=steps: sides[s].windows(count * times[s]) for steps in STEPS})
    turns.play(1, rounds)
    seconds = {steps: [taken / times[steps] for taken in turns.seconds[str(steps)]] for steps in STEPS}
    figures = [_of_steps(steps, seconds, sides[steps]) for steps in STEPS]
    if setup.ranks.is_first:
        show(
            f"W = {setup.ranks.world_size}, B = {micro_batch}, {arguments.config.name}, {rounds} rounds in turn",
            ["N", "seconds per step", "/ (N x that of N = 1)", "95 %", "bytes reduced", "by the formula"],
            [[each["accumulation_steps"], each["seconds"], each["ratio"], "{} to {}".format(*each["interval_95"]),
              each["gradient_bytes"], each["gradient_bytes_expected"]] for each in figures],
        )  # fmt: skip
        tell(_head(arguments, rounds) | {"micro_batch": micro_batch, "threads": setup.threads, "figures": figures})


def _of_steps(steps: int, seconds: dict[int, list[float]], side: Any) -> dict[str, Any]:
    from dsaccum.instruments.collectives import CollectiveRecorder
    from dsaccum.instruments.traffic import expected_traffic, plan_of

    engine = side.engine.engine
    with CollectiveRecorder(engine) as recorder:
        side.windows(1)
    return {
        "accumulation_steps": steps,
        "seconds": round(statistics.median(seconds[steps]), 5),
        **paired(seconds[steps], [steps * taken for taken in seconds[1]]),
        "gradient_bytes": recorder.bytes_of("gradient"),
        "gradient_bytes_expected": sum(each.gradient_bytes for each in expected_traffic(plan_of(engine))),
    }


def over_ranks(arguments: argparse.Namespace) -> None:
    rounds = arguments.rounds or 7
    seconds = rounds_of({str(ranks): lambda r=ranks: _measured_apart(r, arguments) for ranks in RANKS}, rounds)
    figures = [
        {"world_size": ranks, "seconds": round(statistics.median(seconds[str(ranks)]), 5),
         **paired(seconds[str(ranks)], seconds[str(RANKS[0])])} for ranks in RANKS
    ]  # fmt: skip
    show(
        f"N and B fixed, one thread a rank, {arguments.config.name}, {rounds} rounds of processes in turn",
        ["W", "seconds per step", "/ that of W = 1", "95 %"],
        [[each["world_size"], each["seconds"], each["ratio"], "{} to {}".format(*each["interval_95"])]
         for each in figures],
    )  # fmt: skip
    tell(_head(arguments, rounds) | {"threads": 1, "figures": figures})


def _measured_apart(ranks: int, arguments: argparse.Namespace) -> float:
    """Median seconds of a step in processes of their own."""
    overrides = [word for override in arguments.set for word in ("--set", override)]
    command = [sys.executable, __file__, "--over", "W", "--measure-here", "--ranks", str(ranks),
               "--config", str(arguments.config), *overrides]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.splitlines()[-1])


def measure_here(arguments: argparse.Namespace, steps: int = 10) -> None:
    on_ranks(arguments.ranks)
    from sides import Ours

    setup = set_up([*arguments.set, LONG])
    turns = Turns({"ours": Ours(setup, setup.settings(arguments.config)).windows})
    turns.play(1, steps, warm_up=2)
    if setup.ranks.is_first:
        print(statistics.median(turns.seconds["ours"]), flush=True)


def over_model(arguments: argparse.Namespace) -> None:
    from sides import Ours

    setup, rounds = set_up([*arguments.set, LONG]), arguments.rounds or 10
    setups = {width: setup.with_overrides(*arguments.set, LONG, *of_width(width)) for width in arguments.widths}
    sides = {width: Ours(each, each.settings(arguments.config)) for width, each in setups.items()}
    turns = Turns({str(width): side.windows for width, side in sides.items()})
    turns.play(1, rounds)
    batch = sides[arguments.widths[0]].engine.batch
    tokens = batch.total * setup.experiment.data.sequence_length
    figures = [_of_width(width, turns, sides[width].model, tokens) for width in arguments.widths]
    show(
        f"W = 1, N = {batch.accumulation_steps}, B = {batch.micro_batch}, {arguments.config.name}, {rounds} rounds",
        ["width", "parameters", "seconds per step", "/ the smallest's", "95 %", "6 P tokens, GFLOP/s"],
        [[each["width"], each["parameters"], each["seconds"], each["ratio"], "{} to {}".format(*each["interval_95"]),
          each["gflops"]] for each in figures],
    )  # fmt: skip
    tell(_head(arguments, rounds) | {"tokens": tokens, "threads": setup.threads, "figures": figures})


def _of_width(width: int, turns: Turns, model: Any, tokens: int) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = statistics.median(turns.seconds[str(width)])
    first = next(iter(turns.seconds))
    return {
        "width": width,
        "parameters": parameters,
        "seconds": round(seconds, 5),
        **paired(turns.seconds[str(width)], turns.seconds[first]),
        "gflops": round(6 * parameters * tokens / seconds / 1e9, 2),
    }


def over_start(arguments: argparse.Namespace) -> None:
    def first_step(width: int) -> float:
        return seconds_until(training(arguments.config, [*arguments.set, *of_width(width)]))

    _over_widths(arguments, first_step, arguments.rounds or 5, "seconds until the first step is done")


def over_verify(arguments: argparse.Namespace) -> None:
    def verify(width: int) -> float:
        overrides = [word for override in [*arguments.set, *of_width(width)] for word in ("--set", override)]
        words = ["verify", "--deepspeed", str(arguments.config), "--experiment", str(EXPERIMENT), "--full-size"]
        with tempfile.TemporaryDirectory() as folder:
            return wall_seconds(Process([sys.executable, "-m", "dsaccum", *words, *overrides], Path(folder)))

    _over_widths(arguments, verify, arguments.rounds or 3, "seconds of dsaccum verify")


def _over_widths(arguments: argparse.Namespace, measure: Any, rounds: int, what: str) -> None:
    seconds = rounds_of({str(width): lambda w=width: measure(w) for width in arguments.widths}, rounds)
    first = str(arguments.widths[0])
    figures = [
        {"width": width, "seconds": round(statistics.median(seconds[str(width)]), 3),
         **paired(seconds[str(width)], seconds[first])} for width in arguments.widths
    ]  # fmt: skip
    show(
        f"{what}; {arguments.config.name}, {rounds} rounds in turn",
        ["width", "seconds", "/ the smallest's", "95 %"],
        [[each["width"], each["seconds"], each["ratio"], "{} to {}".format(*each["interval_95"])] for each in figures],
    )
    tell(_head(arguments, rounds) | {"figures": figures})


def of_width(width: int) -> list[str]:
    """Overrides that make the experiment's model so wide."""
    return [f"model.config.hidden_size={width}", f"model.config.intermediate_size={4 * width}"]


def _head(arguments: argparse.Namespace, rounds: int) -> dict[str, Any]:
    return {"benchmark": f"growth over {arguments.over}", "config": arguments.config.name, "rounds": rounds}


if __name__ == "__main__":
    main()
