"""The flags of ``launch/train.py``; both spellings of ``--deepspeed`` are understood."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dsaccum.config.errors import ConfigError


@dataclass(frozen=True)
class TrainArguments:
    """What the command line said."""

    deepspeed: Path
    experiment: Path
    accumulation_steps: int | None
    micro_batch: int | None
    output_directory: str | None
    resume: str
    new_effective_batch: bool
    overrides: tuple[str, ...]
    preflight: bool
    verbose: bool


def parse_arguments(command_line: Sequence[str], default_experiment: Path) -> TrainArguments:
    """Parse; ``--help`` prints and exits.

    Raises:
        ConfigError: an unknown flag, a flag without its value, a value of another type, no DeepSpeed JSON.
    """
    parsed = _parser(default_experiment).parse_args(command_line)
    config = parsed.deepspeed_config or (parsed.deepspeed if parsed.deepspeed is not True else None)
    if config is None:
        raise ConfigError("no DeepSpeed JSON was given", source="--deepspeed", fix="--deepspeed ds_configs/accum4.json")
    overrides = list(parsed.set)
    if parsed.steps is not None and parsed.steps < 1:
        raise ConfigError("is no number of steps", key="--steps", value=parsed.steps, allowed="1 or more")
    if parsed.steps is not None:
        overrides.append(f"run.steps={parsed.steps}")
    return TrainArguments(
        deepspeed=Path(config),
        experiment=Path(parsed.experiment),
        accumulation_steps=parsed.accum_steps,
        micro_batch=parsed.micro_batch,
        output_directory=parsed.output_dir,
        resume=parsed.resume,
        new_effective_batch=parsed.new_effective_batch,
        overrides=tuple(overrides),
        preflight=parsed.preflight == "auto",
        verbose=parsed.verbose,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, source="command line", fix="see --help for the flags")


def _parser(default_experiment: Path) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="deepspeed [--num_gpus W] launch/train.py",
        description="Train a GPT with DeepSpeed at any effective batch: the JSON says how to step, the YAML what.",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what decides a run")
    # DeepSpeed's own spelling is a bare --deepspeed with the file in --deepspeed_config.
    what.add_argument("--deepspeed", nargs="?", const=True, metavar="FILE.json", help="DeepSpeed JSON: how to step")
    what.add_argument("--deepspeed_config", metavar="FILE.json", help=argparse.SUPPRESS)
    what.add_argument(
        "--experiment", default=default_experiment, metavar="FILE.yaml", help="what to train (%(default)s)"
    )
    change = parser.add_argument_group("changes for this run")
    change.add_argument("--accum-steps", type=int, metavar="N", help="gradient_accumulation_steps")
    change.add_argument("--micro-batch", type=int, metavar="B", help="train_micro_batch_size_per_gpu")
    change.add_argument("--steps", type=int, metavar="K", help="optimizer steps (run.steps)")
    change.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any field of the YAML")
    checks = parser.add_argument_group("before the first step")
    checks.add_argument(
        "--preflight",
        choices=("auto", "off"),
        default="auto",
        help="auto: verify a small copy of this run, once for each config, model and installed code; "
        "where accumulation is wrong, stop with exit code 1",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-dir",
        metavar="DIR",
        help="a new or empty directory, or that of a run to continue (default: runs/<name>-<n>, a new one)",
    )
    output.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|DIR",
        help="auto: continue the run that --output-dir holds, if it holds one; DIR: continue that one",
    )
    output.add_argument(
        "--new-effective-batch",
        action="store_true",
        help="continue with another effective batch: no longer the run that it was, and recorded as a break",
    )
    output.add_argument(
        "--verbose", action="store_true", help="show what DeepSpeed and transformers log, and tracebacks"
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the DeepSpeed launcher passes it
    return parser
