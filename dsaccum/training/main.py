"""From a command line to an exit code: read, join the other ranks, train, and say how it ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from dsaccum.config.errors import ConfigError
from dsaccum.engine.process import Ranks, limit_threads, quiet_libraries
from dsaccum.training.arguments import parse_arguments
from dsaccum.training.outcome import ExitCode, RunFailed, end_now, refuse, say


def main(command_line: Sequence[str], default_experiment: Path) -> int:
    """Train; returns the exit code of this rank (``ExitCode``), or ends the process with it where it failed.

    Args:
        command_line: flags, without the program's name.
        default_experiment: the YAML to use when ``--experiment`` is not given.
    """
    started = time.perf_counter()
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
        inputs = read_inputs(arguments, ranks)
        joined = True
        code = execute(inputs, ranks, command=list(command_line), started=started)
    except ConfigError as error:
        code = refuse(error, ranks)
    except RunFailed as error:
        if ranks.is_first or error.own:
            say(f"error: {error}")
        code = ExitCode.FAILED
    if joined and code is not ExitCode.DONE:
        end_now(code)
    return code
