"""The Python standard library as a corpus: real text, on every machine, nothing downloaded."""

from __future__ import annotations

import codecs
import io
import os
import platform
import sysconfig
import tokenize
from pathlib import Path
from typing import Any, Final, NamedTuple

from dsaccum.data.documents import Document, Documents

# Tests are half of the standard library and much of them is data; the last three aren't the library's own source.
_LEFT_OUT: Final = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"})


class SourceFile(NamedTuple):
    """A Python file: its path inside the library (with slashes), its size in bytes, and its text."""

    path: str
    size: int
    text: str


def standard_library_documents() -> Documents:
    """Every ``.py`` file of the running interpreter's standard library, one document each."""
    files, unreadable = read_standard_library()
    return Documents([Document(file.text) for file in files], describe_files("python-stdlib", files, unreadable))


def read_standard_library(root: str | Path | None = None) -> tuple[list[SourceFile], list[str]]:
    """Read the library's own ``.py`` files, sorted by path.

    Args:
        root: the library's directory; the running interpreter's by default.

    Returns:
        The files, and the paths of those that can't be read or decoded by their declared encoding (PEP 263).
    """
    root = str(root or sysconfig.get_path("stdlib"))
    files, unreadable = [], []
    for path in _python_files(root):
        try:
            raw = Path(root, path).read_bytes()
            files.append(SourceFile(path, len(raw), decode_source(raw)))
        except (OSError, SyntaxError, UnicodeDecodeError):
            unreadable.append(path)
    return files, unreadable


def decode_source(raw: bytes) -> str:
    """Text of a Python file in its declared encoding (PEP 263); line ends become ``\\n``, as Python reads them.

    Raises:
        SyntaxError: the declared encoding is unknown, or contradicts a byte order mark.
        UnicodeDecodeError: the bytes aren't valid in it.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
    text = codecs.decode(raw, encoding)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def describe_files(source: str, files: list[SourceFile], unreadable: list[str]) -> dict[str, Any]:
    """What the run's record keeps: the interpreter's version, and each file with its size in bytes."""
    return {
        "source": source,
        "python": platform.python_version(),
        "files": {file.path: file.size for file in files},
        "unreadable_files": unreadable,
    }


def _python_files(root: str) -> list[str]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        inside = Path(folder).relative_to(root)
        found += [(inside / name).as_posix() for name in names if name.endswith(".py")]
    return sorted(found)
