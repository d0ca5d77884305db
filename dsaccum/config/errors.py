"""What went wrong, told to the person who can mend it: in one line, with the smallest fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Final


class _Absent(Enum):
    """No value stands there. An enum, because it stays itself when the error is sent to another process."""

    ABSENT = 0


_ABSENT: Final = _Absent.ABSENT
_LONGEST_VALUE: Final = 80


class ConfigError(ValueError):
    """A mistake in what the user gave: file, key, value, what is allowed, the smallest fix.

    ``str(error)`` is one line and is all that a user sees; the command ends with exit code 2.

    Args:
        problem: what is wrong, as a short clause ("is not a whole number").
        source: the file (or flag) that holds the mistake.
        key: dotted path of the field inside the source.
        value: what stands there; leave it out when the key is absent.
        allowed: what may stand there.
        fix: the smallest change that mends it, written so that it can be copied.
    """

    def __init__(
        self,
        problem: str,
        *,
        source: str | Path | None = None,
        key: str | None = None,
        value: Any = _ABSENT,
        allowed: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.problem, self.source, self.key, self.allowed, self.fix = problem, source, key, allowed, fix
        self.value = None if value is _ABSENT else value
        self._given_value = value
        place = f"{source}: " if source is not None else ""
        subject = " = ".join(part for part in (key, None if value is _ABSENT else _shown(value)) if part)
        line = place + (f"{subject}: {problem}" if subject else problem)
        if allowed:
            line += f"; allowed: {allowed}"
        if fix:
            line += f"; fix: {fix}"
        super().__init__(" ".join(line.split()))

    def located(self, source: str | Path) -> ConfigError:
        """The same mistake with its file (or flag) named; unchanged when it names one already."""
        return self if self.source is not None else self.moved_to(source)

    def moved_to(self, source: str | Path) -> ConfigError:
        """The same mistake, in another file (or flag)."""
        return ConfigError(
            self.problem, source=source, key=self.key, value=self._given_value, allowed=self.allowed, fix=self.fix
        )


@contextmanager
def located_in(source: str | Path) -> Iterator[None]:
    """Name the file in every ConfigError that is raised inside, so that checks need not carry it around."""
    try:
        yield
    except ConfigError as error:
        raise error.located(source) from None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one most likely meant, or None when nothing comes close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
