"""How a command ends: exit codes that scripts rely on, and the one line that a person reads."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from enum import IntEnum

from dsaccum.config.errors import ConfigError
from dsaccum.verification.ranks.failed import RankFailed


class ExitCode(IntEnum):
    """Of every ``dsaccum`` command."""

    EQUIVALENT = 0
    NOT_EQUIVALENT = 1
    WRONG_INPUT = 2
    NOT_CARRIED_OUT = 3


class NotCarriedOut(Exception):
    """There is no verdict that may stand; the message says why."""


def exit_code_of(work: Callable[[], ExitCode], *, verbose: bool) -> ExitCode:
    """Do the work; whatever goes wrong in it is one line and an exit code.

    Args:
        work: gives the exit code where it ends by itself.
        verbose: whether a rank's last lines, or the traceback of what nobody foresaw, are shown above the line.
    """
    try:
        with _terminated_as_interrupted():
            return work()
    except ConfigError as error:
        return refuse(error)
    except NotCarriedOut as error:
        say(f"error: {error}")
    except KeyboardInterrupt as interruption:
        say(f"error: {str(interruption) or 'interrupted'}; nothing is proven")
    except RankFailed as error:
        say(_rank_failure(error, verbose=verbose))
    except Exception as error:
        say(_unforeseen(error, verbose=verbose))
    return ExitCode.NOT_CARRIED_OUT


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does: ranks are ended, and there is a line and an exit code of ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("terminated (SIGTERM)")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def refuse(error: ConfigError) -> ExitCode:
    """Say what the user can mend."""
    say(f"error: {error}")
    return ExitCode.WRONG_INPUT


def say(text: str) -> None:
    """On stderr; nobody may be left to read it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def show(write: Callable[[], object]) -> None:
    """Write to stdout, which a reader such as ``head`` may have closed: then what is left is dropped."""
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its end


def _rank_failure(error: RankFailed, *, verbose: bool) -> str:
    details = error.details.rstrip()
    if verbose and details:
        return f"{details}\nerror: {_one_line(error)}"
    return f"error: {_one_line(error)}" + ("; --verbose shows its last lines" if details else "")


def _unforeseen(error: Exception, *, verbose: bool) -> str:
    line = f"error: {type(error).__name__}: {_one_line(error) or 'without a message'}"
    return f"{traceback.format_exc()}{line}" if verbose else f"{line}; --verbose shows the traceback"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
