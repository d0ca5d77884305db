"""What a bench is asked for, checked as far as that costs nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsaccum.config.errors import ConfigError
from dsaccum.verification.cases.arguments import check_range

WARM_UP_WINDOWS: Final = 2
"""The first makes the optimizer's states, the second fills the allocator's caches; neither is timed."""
MOST_WINDOWS: Final = 62
RESULTS: Final = Path("bench-results")
"""Where ``--label`` keeps records."""
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class BenchArguments:
    """What the command line said.

    Args:
        deepspeed: the DeepSpeed JSON; its E on ``ranks`` ranks is what is split.
        experiment: the experiment YAML; None for the default one.
        accumulation_steps: the N to try; empty for 1, 2, 4, ... as far as they divide E / W.
        ranks: W; None for as many as there are cores, at most 2.
        rounds: in each, every split runs once, from the same initial weights; even ones mirror each other's order.
        windows: timed ones of each round.
        label: a name to keep the record under.
        overrides: ``section.key=value`` for fields of the YAML.
        verbose: whether libraries may log.
        command: the command line as it was given, for the record.

    Raises:
        ConfigError: a number is out of its range, or the label is no file's name.
    """

    deepspeed: Path
    experiment: Path | None = None
    accumulation_steps: tuple[int, ...] = ()
    ranks: int | None = None
    rounds: int = 4
    windows: int = 5
    label: str | None = None
    overrides: tuple[str, ...] = ()
    verbose: bool = False
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range("--rounds", self.rounds, "is no number of rounds")
        check_range("--windows", self.windows, "is no number of windows that can be timed", most=MOST_WINDOWS)
        check_range("--ranks", self.ranks, "is no number of ranks")
        for steps in self.accumulation_steps:
            check_range("--accum-steps", steps, "is no number of accumulation steps")
        if self.label is not None and not _LABEL.fullmatch(self.label):
            allowed = "letters, digits, '.', '_' and '-'"
            raise ConfigError("is no name to keep results under", key="--label", value=self.label, allowed=allowed)

    @property
    def labelled(self) -> Path | None:
        """The file that ``--label`` asks for."""
        return None if self.label is None else RESULTS / f"{self.label}.json"


def parse_steps(text: str) -> tuple[int, ...]:
    """``"1,2,4"`` as numbers, each once.

    Raises:
        ConfigError: it is no such list.
    """
    try:
        return tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        problem = "is no list of whole numbers"
        raise ConfigError(problem, key="--accum-steps", value=text, fix="--accum-steps 1,2,4") from None
