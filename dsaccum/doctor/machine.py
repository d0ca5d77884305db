"""Where the checks look: environment, files and commands of this machine. Every wait has a limit."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """What a command said.

    Args:
        code: its exit code; None where it could not be started or did not answer in time.
        output: on stdout.
        error: on stderr, or why there is no answer.
    """

    code: int | None
    output: str = ""
    error: str = ""

    @property
    def complaint(self) -> str:
        """The last line that it wrote, on stderr if it wrote there."""
        lines = (self.error.strip() or self.output.strip()).splitlines()
        return lines[-1].strip() if lines else f"exit code {self.code}"


@dataclass(frozen=True)
class Machine:
    """The machine that is looked at.

    Args:
        environment: of this process.
        root: where the file system begins.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")

    def read(self, path: str) -> str | None:
        """A file below the root; None where there is none that can be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def program(self, name: str) -> str | None:
        """Where a command is found, if it is."""
        return shutil.which(name, path=self.environment.get("PATH", os.defpath))

    def answer(self, *words: str, within_s: float) -> Answer:
        """Run a command and wait so long at most."""
        try:
            result = subprocess.run(
                words,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=within_s,
            )
        except subprocess.TimeoutExpired:
            return Answer(None, error=f"no answer within {within_s:g} s")
        except OSError as error:
            return Answer(None, error=error.strerror or str(error))
        return Answer(result.returncode, result.stdout, result.stderr)

    @property
    def home(self) -> Path:
        """The user's own folder."""
        return Path(self.environment.get("HOME") or Path.home())

    @property
    def in_container(self) -> bool:
        """Whether Docker or Podman says so."""
        return any((self.root / mark).exists() for mark in (".dockerenv", "run/.containerenv"))

    @property
    def gpus_hidden_by(self) -> str:
        """What in the environment says that ranks run on the CPU; empty where nothing does."""
        if self.environment.get("DS_ACCELERATOR") == "cpu":
            return "DS_ACCELERATOR=cpu"
        visible = self.environment.get("CUDA_VISIBLE_DEVICES")
        return f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None and visible.strip() in ("", "-1") else ""

    @property
    def gpu_devices(self) -> int:
        """NVIDIA GPUs that a loaded driver shows, and that ranks may use."""
        return 0 if self.gpus_hidden_by else sum(1 for _ in (self.root / "dev").glob("nvidia[0-9]*"))


def in_background(work: Callable[[], T]) -> Future[T]:
    """Begin work that may never end, such as a look at a dead network mount; it keeps no process from ending."""
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return future


def python() -> str:
    """The command that starts the Python that runs, whichever is first on PATH."""
    found = shutil.which("python")
    is_first = found is not None and os.path.dirname(found) == os.path.dirname(sys.executable)
    return "python" if is_first else shlex.quote(sys.executable)
