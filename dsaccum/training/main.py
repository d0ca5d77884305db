"""From a command line to an exit code: read, join the other ranks, train, and say how it ended."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsaccum.config.errors import ConfigError
from dsaccum.engine.process import Ranks, let_idle_threads_sleep, limit_threads, quiet_libraries
from dsaccum.training.arguments import parse_arguments
from dsaccum.training.outcome import (
    ExitCode,
    Interrupted,
    RunFailed,
    end_now,
    ended_while_first_rank_speaks,
    refuse,
    say,
)
from dsaccum.training.preflight import NotEquivalent

if TYPE_CHECKING:
    from dsaccum.training.micro_batch import Sizing
    from dsaccum.training.preflight import Preflight


def main(
    command_line: Sequence[str],
    default_experiment: Path,
    preflight: Preflight | None = None,
    sizing: Sizing | None = None,
) -> int:
    """Train; returns the exit code of this rank (``ExitCode``), or ends the process with it where it failed.

    Args:
        command_line: flags, without the program's name.
        default_experiment: the YAML to use when ``--experiment`` is not given.
        preflight: asked before the first step, unless ``--preflight off``.
        sizing: asked for the micro-batch that a run with ``"auto"`` starts with.
    """
    started = time.perf_counter()
    _open_streams()
    _let_signals_interrupt()
    let_idle_threads_sleep()
    ranks = Ranks.from_environment()
    joined = False
    try:
        arguments = parse_arguments(command_line, default_experiment)
        if not arguments.verbose:
            quiet_libraries()
        # torch and DeepSpeed come with these: seconds that --help and a wrong flag don't need.
        from dsaccum.training.inputs import read_inputs
        from dsaccum.training.run import execute

        limit_threads(ranks)
        with _one_line(verbose=arguments.verbose):
            inputs = read_inputs(arguments, ranks)
        joined = True
        asked = preflight if arguments.preflight else None
        code = execute(inputs, ranks, command=list(command_line), started=started, preflight=asked, sizing=sizing)
    except ConfigError as error:
        code = refuse(error, ranks)
    except NotEquivalent as finding:
        code = _stop(finding, ranks)
    except RunFailed as error:
        if ranks.is_first or error.own:
            say(f"error: {error}")
        code = ExitCode.FAILED
    except Interrupted as stopped:
        if ranks.is_first:
            say(str(stopped))
        code = ExitCode.INTERRUPTED
    except KeyboardInterrupt:
        if ranks.is_first:
            say("error: interrupted before the first step; nothing was trained")
        code, joined = ExitCode.FAILED, True
    if joined and code is not ExitCode.DONE:
        end_now(code)
    return code


def _stop(finding: NotEquivalent, ranks: Ranks) -> ExitCode:
    """Rank 0 says the whole finding; its launcher would end it with the first rank that has ended."""
    if ranks.is_first:
        say(f"{finding}\nerror: stopped before the first step: the reason stands above; --preflight off trains anyway")
    else:
        ended_while_first_rank_speaks()
    return ExitCode.NOT_EQUIVALENT


@contextlib.contextmanager
def _one_line(*, verbose: bool) -> Iterator[None]:
    """A net below all checks: what no check has foreseen is still the input's doing, and one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if verbose:
            traceback.print_exc()
        reason = " ".join(str(error).split())
        problem = f"the input cannot be used ({type(error).__name__}: {reason})"
        raise ConfigError(problem, fix="look at the value named here; --verbose shows where it was read") from error


def _let_signals_interrupt() -> None:
    """Until the run listens to them, what schedulers send ends it as Ctrl-C does: with a line, and a code of ours."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)


def _open_streams() -> None:
    """Make stdout and stderr safe to write to: closed ones lead nowhere, and no character can break the run."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open to the end of the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
