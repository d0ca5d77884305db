"""What all watched subjects share: which windows to look at, where findings go, what happens when watching fails."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from types import FrameType

from dsaccum.watch.window import WatchedWindow

DEFAULT_WINDOW = 3
"""In the first the rate may be 0, ZeRO 3 still traces, and a bare optimizer's model is found; the second says how many
micro-batches a window has."""


class StopAfterWindow(SystemExit):
    """Ends the script where ``--stop-after-window`` asked for it; as exit code 0."""


@dataclass
class Desk:
    """Where a subject asks what to do and hands in what it found.

    Attributes:
        windows: optimizer steps to look at, from 1, in order.
        found: gets each window, on the rank that judges.
        stop_after: end the script after the last of them, of all subjects.
        verbose: tracebacks of our own failures.
        said: messages so far.
        unproven: those of them that say what was not looked at to its end, and why.
        subjects: how many were found.
        looked_for: those of them that have windows to come.
        session: of this process, from 1; ranks that meet are in the same one.
    """

    windows: tuple[int, ...]
    found: Callable[[WatchedWindow], None]
    stop_after: bool = False
    verbose: bool = False
    said: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    subjects: int = 0
    looked_for: set[int] = field(default_factory=set)
    session: int = field(default_factory=count(1).__next__)

    def say(self, text: str) -> None:
        """One line on stderr; a message is said once."""
        if text in self.said:
            return
        self.said.append(text)
        with suppress(Exception):  # a stream that a script has closed, or put something else in place of
            sys.stderr.write(f"dsaccum.watch: {text}\n")
            sys.stderr.flush()

    def miss(self, text: str) -> None:
        """Something is not looked at to its end: one line, which keeps the run from being proven right."""
        self.say(text)
        if text not in self.unproven:
            self.unproven.append(text)

    def refuse(self, reason: object) -> None:
        """Something that trains is not watched at all."""
        self.miss(f"not watched: {reason}; the script goes on")

    def give_up(self, what: str, error: BaseException) -> None:
        """Watching failed; the script goes on."""
        self.miss(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}; the script goes on unwatched")
        if self.verbose:
            with suppress(Exception):
                sys.stderr.write(traceback.format_exc())

    def number(self) -> int:
        """Of a new subject, from 1."""
        self.subjects += 1
        self.looked_for.add(self.subjects)
        return self.subjects

    def seen(self, subject: int) -> None:
        """A subject has no window to come; of several engines, the first to be through must not end the script.

        Raises:
            StopAfterWindow: nor has any other, and the script is to end then.
        """
        self.looked_for.discard(subject)
        if self.stop_after and not self.looked_for:
            raise StopAfterWindow(0)


def framework() -> str:
    """Who drives the run, told from who is calling."""
    frame: FrameType | None = sys._getframe()
    found = ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        root = name.partition(".")[0]
        if root == "trl" or _is_trl(frame.f_locals.get("self")):
            return "TRL"
        if name.startswith("transformers.trainer"):
            found = "Trainer"
        elif root in ("lightning", "pytorch_lightning") and found != "Trainer":
            found = "Lightning"
        elif root == "accelerate" and not found:
            found = "Accelerate"
        frame = frame.f_back
    return found


def scaler_steps() -> bool:
    """Whether a ``GradScaler``, switched on, is what calls the optimizer."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return bool(getattr(frame.f_locals.get("self"), "_enabled", True))
        frame = frame.f_back
    return False


def _is_trl(driver: object) -> bool:
    """Most of what TRL's trainers do is inherited, and no function of TRL's is running then."""
    inherited = any(kind.__module__.startswith("transformers.trainer") for kind in type(driver).__mro__)
    return inherited and any(kind.__module__.partition(".")[0] == "trl" for kind in type(driver).__mro__)
