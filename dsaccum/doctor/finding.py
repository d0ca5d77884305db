"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]
"""``problem`` would make training or verifying fail or be wrong; ``note`` is worth knowing and stops nothing."""


@dataclass(frozen=True)
class Finding:
    """What was found in one place.

    Args:
        name: of the place, at most 15 characters.
        found: what is there, without judgement.
        state: the judgement.
        consequence: what goes wrong because of it, or does not work.
        fix: the smallest one, as a command that can be copied.

    Raises:
        ValueError: a problem without a consequence or a fix.
    """

    name: str
    found: str
    state: State = "ok"
    consequence: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        if self.state == "problem" and not (self.consequence and self.fix):
            raise ValueError(f"{self.name}: a problem needs a consequence and a fix")
