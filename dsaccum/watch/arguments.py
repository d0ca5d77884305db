"""The command line: flags of the watch up to ``--``, then the script with its own.

``deepspeed`` puts ``--local_rank=R`` before everything: it is the script's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dsaccum.config.errors import ConfigError
from dsaccum.report.new_files import check_new_files
from dsaccum.watch.desk import DEFAULT_WINDOW

MOST_WINDOWS = 10_000
"""In one range."""
USAGE = """\
usage: python -m dsaccum.watch [FLAGS] -- SCRIPT.py ITS ARGUMENTS
       deepspeed --num_gpus W --module dsaccum.watch [FLAGS] -- SCRIPT.py ITS ARGUMENTS
       torchrun --nproc-per-node W -m dsaccum.watch [FLAGS] -- SCRIPT.py ITS ARGUMENTS
       accelerate launch -m dsaccum.watch [FLAGS] -- SCRIPT.py ITS ARGUMENTS

Runs the script as it is, looks at one optimizer step of it, and says whether the
update was that of one big batch. The script may also be -m PACKAGE.MODULE.

flags:
  --window K[,K...]    which optimizer steps, from 1; a range is 2-4 (default: 3)
  --json OUT.json      write the record dsaccum.watch/1 to a new file
  --html OUT.html      write the report to a new file, as one page
  --fail               where the script's own exit code is 0: exit with 1 if the verdict
                       is WRONG, with 3 if nothing is proven (NONE, or nothing judged)
  --stop-after-window  end the script when the last window has been looked at
  --verbose            tracebacks of the watch's own failures
  -h, --help           this text
"""


@dataclass(frozen=True)
class WatchArguments:
    """What was asked for.

    Attributes:
        windows: optimizer steps.
        script: path, or the module's name after ``-m``.
        is_module: which of the two.
        words: the script's own arguments.
        json: where the record goes.
        html: where the report goes.
        fail: a bad verdict is exit code 1, and none is 3.
        stop_after_window: end the script then.
        verbose: tracebacks.
    """

    windows: tuple[int, ...]
    script: str
    is_module: bool
    words: tuple[str, ...]
    json: Path | None = None
    html: Path | None = None
    fail: bool = False
    stop_after_window: bool = False
    verbose: bool = False


def parse_arguments(given: Sequence[str]) -> WatchArguments | None:
    """Read the command line; None where help is asked for.

    Raises:
        ConfigError: a flag is unknown, a value wrong, or there is no script.
    """
    words = list(given)
    launcher: list[str] = []
    values: dict[str, str] = {}
    switches: set[str] = set()
    while words:
        word = words.pop(0)
        if word == "--":
            break
        flag, _, value = word.partition("=")
        if flag in ("--local_rank", "--local-rank"):
            launcher.append(word if value else f"{flag}={words.pop(0)}" if words else word)
        elif flag in ("-h", "--help"):
            return None
        elif flag in ("--fail", "--stop-after-window", "--verbose") and not value:
            switches.add(flag)
        elif flag in ("--window", "--json", "--html"):
            if not value and (not words or words[0].startswith("-")):
                raise ConfigError("needs a value", key=flag, fix="see python -m dsaccum.watch --help")
            values[flag] = value or words.pop(0)
        elif word.startswith("-") and word != "-m":
            raise ConfigError(
                "there is no such flag", key=flag, fix="see --help; the script's own flags follow after --"
            )
        else:
            words.insert(0, word)
            break
    is_module = bool(words) and words[0] == "-m"
    words = words[1:] if is_module else words
    if not words:
        raise ConfigError(
            "there is no script", key="SCRIPT.py", fix="python -m dsaccum.watch -- SCRIPT.py ITS ARGUMENTS"
        )
    if not is_module and not Path(words[0]).is_file():
        problem = "is a directory" if Path(words[0]).is_dir() else "there is no such file"
        raise ConfigError(problem, key="SCRIPT.py", value=words[0], fix="check the path")
    json, html = (Path(values[flag]) if flag in values else None for flag in ("--json", "--html"))
    check_new_files({"--json": json, "--html": html})
    return WatchArguments(
        windows=windows_of(values.get("--window", str(DEFAULT_WINDOW))),
        script=words[0],
        is_module=is_module,
        words=(*launcher, *words[1:]),
        json=json,
        html=html,
        fail="--fail" in switches,
        stop_after_window="--stop-after-window" in switches,
        verbose="--verbose" in switches,
    )


def check_module(name: str) -> None:
    """Looks for the package alone: to look into it would be to import it, before anything is watched.

    Raises:
        ConfigError: there is none.
    """
    with suppress(ImportError, ValueError):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return
    raise ConfigError("there is no such module", key="-m", value=name, fix="check the name, and where you are")


def windows_of(text: str) -> tuple[int, ...]:
    """``3``; ``2,5``; ``2-4``.

    Raises:
        ConfigError: it is none of these.
    """
    found: set[int] = set()
    for part in text.split(","):
        ends = part.split("-")
        right = len(ends) <= 2 and all(end.isascii() and end.isdecimal() for end in ends)
        first, last = (int(ends[0]), int(ends[-1])) if right else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError("is no optimizer step from 1", key="--window", value=text, fix="--window 3, 2,5 or 2-4")
        if last - first >= MOST_WINDOWS:
            raise ConfigError(
                "is too many", key="--window", value=text, allowed=f"{MOST_WINDOWS:,} at most", fix="each takes time"
            )
        found |= set(range(first, last + 1))
    return tuple(sorted(found))
