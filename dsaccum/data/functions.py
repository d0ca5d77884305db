"""Functions of the standard library as prompt and target: truly ragged target counts, as in supervised fine-tuning."""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Iterator
from typing import Final

from dsaccum.data.documents import Document, Documents
from dsaccum.data.standard_library import SourceFile, describe_files, read_standard_library

# All 6,000 would keep the first training step waiting for a second more, and teach nothing else.
MOST_FUNCTIONS: Final = 3000


def function_documents() -> Documents:
    """Functions that have a docstring: signature and docstring are the prompt, the rest of the body is the target.

    Files are taken in the order of their path's sha256 (a fair sample of the library, the same everywhere) until
    ``MOST_FUNCTIONS`` functions are found; the description lists the files that were used.
    """
    files, unreadable = read_standard_library()
    files.sort(key=lambda file: hashlib.sha256(file.path.encode()).digest())
    functions: list[Document] = []
    used: list[SourceFile] = []
    for file in files:
        if len(functions) >= MOST_FUNCTIONS:
            break
        functions += functions_of(file.text)
        used.append(file)
    return Documents(functions[:MOST_FUNCTIONS], describe_files("python-functions", used, unreadable))


def functions_of(text: str) -> list[Document]:
    """The documented functions and methods of a Python file, dedented; none when it isn't valid Python.

    Functions inside functions are left out: they are part of the outer one's target. So are one-line bodies, where
    the docstring shares its line with code, and functions that are nothing but a docstring.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old files hold invalid escapes, which is no news to the user
        try:
            module = ast.parse(text)
        except (SyntaxError, ValueError):
            return []
    lines = text.split("\n")  # not splitlines(): form feeds end no line for ast
    return [_document(function, lines) for function in _functions(module.body) if _has_both_parts(function)]


def _functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
        elif isinstance(statement, ast.ClassDef):
            yield from _functions(statement.body)


def _has_both_parts(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    if ast.get_docstring(function, clean=False) is None or len(function.body) < 2:
        return False
    docstring, rest = function.body[0], function.body[1]
    return function.lineno < docstring.lineno and (docstring.end_lineno or 0) < rest.lineno


def _document(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> Document:
    first, last = function.lineno - 1, function.end_lineno
    target_start = function.body[0].end_lineno  # the line after the docstring's last, counted from 0
    dedented = [_dedent(line, function.col_offset) for line in lines[first:last]]
    split = (target_start or 0) - first
    return Document(prompt="\n".join(dedented[:split]) + "\n", target="\n".join(dedented[split:]) + "\n")


def _dedent(line: str, width: int) -> str:
    # Not textwrap.dedent: one unindented line of a multi-line string would keep it from dedenting anything.
    return line[width:] if not line[:width].strip() else line
