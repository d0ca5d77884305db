"""What a verification of a continued run is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsaccum.verification.cases.arguments import Arguments


@dataclass(frozen=True)
class ResumeArguments(Arguments):
    """What the command line said.

    Args:
        directory: of the run.
    """

    directory: Path
