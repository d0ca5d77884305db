"""What a verification of a continued run is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsaccum.verification.cases.arguments import MOST_STEPS, check_fault, check_range


@dataclass(frozen=True)
class ResumeArguments:
    """What the command line said.

    Args:
        directory: of the run.
        ranks: W; None for as many as there are cores, at most 2.
        steps: windows to compare, 1 to 64.
        accumulation_steps: N; None for what follows from B, or for that of the checkpoint.
        micro_batch: B; None for what follows from N.
        fault: identifier of a fault to inject, or ``FILE.py:function`` that gives one.
        remedies: whether our remedies for DeepSpeed's faults are applied.
        strict: whether an untested claim counts as not carried out.
        verbose: whether libraries may log.
        command: the command line as it was given, for the record.

    Raises:
        ConfigError: a number is out of its range, or there is no such fault.
    """

    directory: Path
    ranks: int | None = None
    steps: int = 3
    accumulation_steps: int | None = None
    micro_batch: int | None = None
    fault: str | None = None
    remedies: bool = True
    strict: bool = False
    verbose: bool = False
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range("--ranks", self.ranks, "is no number of ranks")
        check_range("--steps", self.steps, "is no number of steps that can be compared", most=MOST_STEPS)
        check_range("--accum-steps", self.accumulation_steps, "is no number of accumulation steps")
        check_range("--micro-batch", self.micro_batch, "is no micro-batch size")
        if self.fault is not None:
            check_fault(self.fault)
