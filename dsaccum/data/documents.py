"""Documents: what every source gives, whatever it was read from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple


class Document(NamedTuple):
    """One text in two parts: a prompt that is context only (often empty), and the target that counts in the loss."""

    target: str
    prompt: str = ""

    @property
    def digest(self) -> bytes:
        """sha256 over both parts; the prompt's length keeps ("a", "b") and ("ab", "") apart."""
        prompt, target = self.prompt.encode(), self.target.encode()
        return hashlib.sha256(b"%d:" % len(prompt) + prompt + target).digest()


@dataclass(frozen=True)
class Documents:
    """A corpus in a fixed order.

    Args:
        items: the documents; all of them are held in memory, since the order of samples needs random access.
        origin: where they came from, for the run's record (JSON types only).
    """

    items: list[Document]
    origin: dict[str, Any]

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def digests(self) -> list[bytes]:
        """sha256 of each document."""
        return [document.digest for document in self.items]

    @property
    def description(self) -> dict[str, Any]:
        """The origin, the number of documents, and a sha256 over content and order (JSON types only)."""
        content = hashlib.sha256(b"".join(self.digests)).hexdigest()
        return {**self.origin, "documents": len(self), "sha256": content}
