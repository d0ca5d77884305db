"""A preflight in the test's own process, which is the only rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from dsaccum.engine.process import Ranks
from dsaccum.preflight import preflight
from dsaccum.training.arguments import parse_arguments
from dsaccum.training.inputs import Inputs, read_inputs
from tests.training.launching import ACCUM4, REPOSITORY, TINY

EXPERIMENT = REPOSITORY / "launch" / "experiments" / "stdlib-nano.yaml"


class Watchdog:
    def __init__(self) -> None:
        self.moves = 0

    def at(self, step: int, micro_step: int, phase: str) -> None:
        self.moves += 1


class Said(NamedTuple):
    record: dict[str, Any]
    lines: list[str]
    moves: int


def inputs_of(ranks: Ranks, *flags: str, **config: Any) -> Inputs:
    path = ACCUM4
    if config:
        path = Path(config.pop("at")) / "ds.json"
        path.write_text(json.dumps(json.loads(ACCUM4.read_text()) | config))
    return read_inputs(parse_arguments(["--deepspeed", str(path), *TINY, *flags], EXPERIMENT), ranks)


def ask(inputs: Inputs, ranks: Ranks) -> Said:
    watchdog, lines = Watchdog(), []
    record = preflight(inputs, ranks, watchdog, lines.append)  # type: ignore[arg-type]
    return Said(record, lines, watchdog.moves)
