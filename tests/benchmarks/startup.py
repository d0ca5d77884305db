"""How long a start takes: each command's help, verify up to its first case, training up to its first step.

Run: python tests/benchmarks/startup.py [--rounds 10] [--what help verify training]

Processes of their own, in turn. ``help`` is the wall clock of ``python -m dsaccum ... --help``, beside a Python that
does nothing; ``verify`` is from the process's start until its input is read and its ranks have started, when they are
handed the first case; ``training`` is ``launch/train.py`` against ``bare_start.py``, from the start until the first
optimizer step is done, without the preflight.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import (
    Process,
    Start,
    bare_training,
    rounds_of,
    seconds_until,
    training,
    wall_seconds,
)
from side_by_side import CONFIGS, EXPERIMENT, paired, show, tell

COMMANDS = ("", "verify", "faults", "audit", "bench", "plan", "doctor", "report")

UP_TO_THE_FIRST_CASE = """
import sys
from pathlib import Path
from dsaccum.cli import main
from dsaccum.verification.ranks.pool import RankPool

folder, *words = sys.argv[1:]
joined = RankPool._joined_team

def told(self):
    (Path(folder) / "read").write_text("config, data and model are read")
    team = joined(self)
    (Path(folder) / "begun").write_text("the ranks are ready, and are about to get the case")
    return team

RankPool._joined_team = told
main(words)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--what", nargs="+", choices=["help", "verify", "training"], default=["help", "verify", "training"]
    )
    parser.add_argument("--config", type=Path, default=CONFIGS / "accum4.json")
    arguments = parser.parse_args()
    work = {"help": of_help, "verify": of_verify, "training": of_training}
    for what in arguments.what:
        work[what](arguments)


def of_help(arguments: argparse.Namespace) -> None:
    commands = {"python -c pass": ["-c", "pass"]}
    commands |= {
        f"dsaccum {name} --help".replace("  ", " "): ["-m", "dsaccum", *name.split(), "--help"] for name in COMMANDS
    }
    with tempfile.TemporaryDirectory() as folder:
        processes = {name: Process([sys.executable, *words], Path(folder)) for name, words in commands.items()}
        measures = {name: lambda p=process: wall_seconds(p) for name, process in processes.items()}
        seconds = rounds_of(measures, arguments.rounds)
    tell_of("help", seconds, arguments)


def of_verify(arguments: argparse.Namespace) -> None:
    words = ["verify", "--deepspeed", str(arguments.config), "--experiment", str(EXPERIMENT)]
    command = [sys.executable, "-c", UP_TO_THE_FIRST_CASE, "{folder}", *words]
    starts = {"verify, up to its first case": Start(command, "begun"), "of that, input read": Start(command, "read")}
    seconds = rounds_of({name: lambda s=start: seconds_until(s) for name, start in starts.items()}, arguments.rounds)
    tell_of("verify", seconds, arguments)


def of_training(arguments: argparse.Namespace) -> None:
    starts = {"bare DeepSpeed": bare_training(arguments.config), "dsaccum": training(arguments.config)}
    seconds = rounds_of({name: lambda s=start: seconds_until(s) for name, start in starts.items()}, arguments.rounds)
    tell_of("training", seconds, arguments)


def tell_of(what: str, seconds: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    """Ratios are to the first of them."""
    first = next(iter(seconds))
    figures: dict[str, dict[str, Any]] = {
        name: {"seconds": round(statistics.median(taken), 4), "least": round(min(taken), 4),
               **paired(taken, seconds[first])} for name, taken in seconds.items()
    }  # fmt: skip
    show(
        f"{what}: {arguments.rounds} rounds of processes in turn",
        ["process", "seconds", "least", f"/ {first}", "95 %"],
        [[name, each["seconds"], each["least"], each["ratio"], "{} to {}".format(*each["interval_95"])]
         for name, each in figures.items()],
    )  # fmt: skip
    tell({"benchmark": f"start-up: {what}", "rounds": arguments.rounds, "figures": figures})


if __name__ == "__main__":
    main()
