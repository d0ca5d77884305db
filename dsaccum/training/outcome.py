"""How a run ends: exit codes that scripts rely on, and the one line that a person reads."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from enum import IntEnum

from dsaccum.config.errors import ConfigError
from dsaccum.engine.process import Ranks

FIRST_RANK_SPEAKS_S = 10.0
"""How long the other ranks leave the word to rank 0; its launcher ends them meanwhile, if busy after 3 s and more."""


class ExitCode(IntEnum):
    """Of each rank; the DeepSpeed launcher passes on the first that isn't 0 (and shows 247 for a killed rank)."""

    DONE = 0
    NOT_EQUIVALENT = 1
    WRONG_INPUT = 2
    FAILED = 3
    INTERRUPTED = 75
    """Stopped at a boundary, with a checkpoint from which it can be continued."""


class RunFailed(Exception):
    """The run could not be carried out; the message names rank, step and cause.

    Args:
        own: whether this rank speaks, be it rank 0 or not: nobody else knows. Otherwise rank 0 speaks for all.
    """

    def __init__(self, message: str, *, own: bool = False) -> None:
        self.own = own
        super().__init__(message)


class Interrupted(Exception):
    """The run was asked to stop, and did at a boundary, on all ranks alike; the message says how to continue it."""


def refuse(error: ConfigError, ranks: Ranks) -> ExitCode:
    """Say once, on rank 0, what the user can mend. Another rank speaks only if rank 0 found nothing wrong."""
    if ranks.is_first:
        say(f"error: {error}")
    elif not ended_while_first_rank_speaks():
        say(f"error on rank {ranks.rank}: {error}")
    return ExitCode.WRONG_INPUT


def ended_while_first_rank_speaks() -> bool:
    """Wait for the launcher to end this rank, which it does once rank 0 has ended; whether it did."""
    try:
        time.sleep(FIRST_RANK_SPEAKS_S)
    except KeyboardInterrupt:
        return True
    return False


def say(line: str) -> None:
    """One whole line on stderr, so that ranks don't mix within it; nobody may be left to read it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def end_now(code: ExitCode) -> None:
    """End this process without waiting for anybody: a peer that hangs would hold up any orderly way out."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
