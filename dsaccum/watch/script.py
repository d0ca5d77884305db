"""Somebody's script, run as if by ``python SCRIPT.py``."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Sequence


def run_script(path: str, words: Sequence[str]) -> None:
    """Run a file in this process's ``__main__``, with its own ``sys.argv`` and its folder first in ``sys.path``.

    In ``__main__`` itself, so that what it pickles can be found again, and what runs at exit still has its names.
    """
    import __main__

    full = os.path.abspath(path)
    sys.argv[:] = [path, *words]
    sys.path[0] = os.path.dirname(full)
    with open(full, "rb") as file:
        code = compile(file.read(), full, "exec", dont_inherit=True)  # or this file's __future__ would be the script's
    names = __main__.__dict__
    names.clear()
    names.update(
        __name__="__main__",
        __file__=os.path.join(os.getcwd(), path),
        __builtins__=builtins,
        __package__=None,
        __spec__=None,
        __doc__=None,
        __loader__=None,
        __cached__=None,
    )
    exec(code, names)


def run_module(name: str, words: Sequence[str]) -> None:
    """Run a module as ``python -m`` would."""
    sys.argv[:] = [name, *words]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
