"""The command: the watch around a script, and how the process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsaccum.config.errors import ConfigError
from dsaccum.watch.arguments import USAGE, WatchArguments, check_module, parse_arguments
from dsaccum.watch.script import run_module, run_script

if TYPE_CHECKING:
    from dsaccum.watch.session import Session

WRONG, UNPROVEN = 1, 3
"""Exit codes under ``--fail``, where the script's own is 0."""


def main() -> int:
    """Run the script under watch; returns its exit code, or ours where ``--fail`` asks for it."""
    first = int(os.environ.get("RANK", 0)) == 0
    try:
        arguments = parse_arguments(sys.argv[1:])
        if arguments is not None and arguments.is_module:
            check_module(arguments.script)
    except ConfigError as error:
        if first:
            sys.stderr.write(f"error: {error}\n")
        return 2
    if arguments is None:
        if first:
            sys.stdout.write(USAGE)
        return 0
    return _watched(arguments, tuple(sys.argv))


def _watched(arguments: WatchArguments, command: tuple[str, ...]) -> int:
    from dsaccum.watch.session import Session  # torch comes with it

    session = Session(
        arguments.windows,
        json=arguments.json,
        html=arguments.html,
        stop_after=arguments.stop_after_window,
        verbose=arguments.verbose,
        command=("python", "-m", "dsaccum.watch", *command[1:]),
    )
    try:
        code = _exit_code(arguments)
    finally:
        session.end()
    return _judged(session, arguments.windows) if code == 0 and arguments.fail else code


def _judged(session: Session, asked: Sequence[int]) -> int:
    """The exit code that the verdict asks for; only rank 0 knows of one, and the others end as the script did."""
    from dsaccum.watch.proven import why_unproven

    if session.verdict == "not_equivalent":
        return WRONG
    if int(os.environ.get("RANK", 0)) != 0 or (reason := why_unproven(session.record, asked)) is None:
        return 0
    session.desk.say(f"exit code {UNPROVEN}, for --fail was given, and nothing is proven: {reason}")
    return UNPROVEN


def _exit_code(arguments: WatchArguments) -> int:
    try:
        if arguments.is_module:
            run_module(arguments.script, arguments.words)
        else:
            run_script(arguments.script, arguments.words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0)
        sys.stderr.write(f"{end.code}\n")
        return 1
    return 0
