"""What a diagnosis says of one thing that is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Named:
    """One thing that is wrong: the candidates that explain it (one, if it is certain) and what speaks for them."""

    candidates: tuple[str, ...]
    evidence: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    fix: str | None = None
    """Where another than the candidate's own fits better."""
