"""Somebody's script, watched in processes of its own: started, waited for with a limit, and none left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from dsaccum.config.errors import ConfigError

if TYPE_CHECKING:
    from dsaccum.verification.records.watch import WatchRecord

MARK = "DSACCUM_WATCHED_RUN"
"""Environment variable that all processes of a run inherit, whatever sessions they start."""
GRACE_S = 10.0
"""From asking a process to end to ending it."""
MOST_LINES = 40
_OF_A_LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
"""Left in this process by DeepSpeed or a launcher: the script would take itself for one of its ranks."""


class ScriptFailed(Exception):
    """A watched script came to no record; the message is one line and the last lines of its output."""


def watch_script(
    script: str | os.PathLike[str],
    *words: str,
    ranks: int | None = None,
    window: int | tuple[int, ...] = 3,
    to_the_end: bool = False,
    timeout_s: float = 600,
    folder: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> WatchRecord:
    """Run a script as ``python -m dsaccum.watch`` does, and give the record.

    Args:
        script: its path; or ``"-m"``, and the module's name as the first of the words.
        words: its own arguments.
        ranks: started by torchrun; None for ``python SCRIPT``. A script with DeepSpeed needs 1 at least.
        window: which optimizer steps to look at, from 1.
        to_the_end: whether the script goes on after the last window.
        timeout_s: how long it may take.
        folder: its working directory; this process's own if left out.
        environment: variables of its own, beside those of this process.

    Raises:
        ConfigError: there is no such script, or no such number of ranks.
        ScriptFailed: it ended with an error, took too long, or left no record.
    """
    if os.fspath(script) != "-m" and not Path(folder or ".", script).is_file():
        raise ConfigError("there is no such file", key="script", value=os.fspath(script), fix="check the path")
    if ranks is not None and ranks < 1:
        raise ConfigError("is no number of ranks", key="ranks", value=ranks, allowed="1 or more, or None")
    with tempfile.TemporaryDirectory(prefix="dsaccum-watch-") as scratch:
        record, output = Path(scratch, "record.json"), Path(scratch, "output.txt")
        windows = (window,) if isinstance(window, int) else window
        flags = ["--window", ",".join(map(str, windows)), "--json", str(record)]
        flags += [] if to_the_end else ["--stop-after-window"]
        command = [sys.executable, *_launcher(ranks), "-m", "dsaccum.watch", *flags, "--", os.fspath(script), *words]
        code = _run(command, output, timeout_s, folder, environment or {})
        if code != 0:
            how = f"did not end in {timeout_s:g} s, and was ended" if code is None else f"ended with exit code {code}"
            raise ScriptFailed(f"{script} {how}\n{_last_lines(output)}")
        if not record.exists():
            raise ScriptFailed(f"{script} ended without a record\n{_last_lines(output)}")
        from dsaccum.verification.records.watch import WatchRecord  # pydantic comes with it

        return WatchRecord.read(record)


def _launcher(ranks: int | None) -> list[str]:
    if ranks is None:
        return []
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def _run(
    command: list[str],
    output: Path,
    timeout_s: float,
    folder: str | os.PathLike[str] | None,
    environment: Mapping[str, str],
) -> int | None:
    """Exit code; None where it took too long."""
    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    try:
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**inherited, **environment, MARK: mark},
            )
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_all(mark)


def _end_all(mark: str) -> None:
    left = _marked(mark)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(left, GRACE_S)
        left = _marked(mark)  # with what came only now


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):  # another user's, or gone
            continue
    return found


def _last_lines(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-MOST_LINES:])
