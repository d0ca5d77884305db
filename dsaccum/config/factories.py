"""``FILE.py:function``: the one place where a config may name code, for ``model.factory`` and ``loss.factory``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsaccum.config.errors import ConfigError, nearest


def load_factory(reference: str, *, source: str | Path, key: str) -> Callable[..., Any]:
    """Import the function that ``reference`` names. Its file is executed: only name code that you trust.

    Raises:
        ConfigError: the file is missing, cannot be executed, or has no such function.
    """
    path_text, _, name = reference.rpartition(":")
    path = Path(path_text)
    if not _is_file(path):
        raise ConfigError("there is no such file", source=source, key=key, value=reference, allowed="FILE.py:function")
    module_name = f"_dsaccum_factory_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError("is not a Python file", source=source, key=key, value=reference, allowed="FILE.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        problem = f"the file cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(problem, source=source, key=key, value=reference) from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        guess = nearest(name, known)
        raise ConfigError(
            f"{path} has no function {name!r}",
            source=source,
            key=key,
            value=reference,
            fix=f"{path_text}:{guess}" if guess else f"define {name} in {path}",
        )
    return function


def call_factory(reference: str, *, source: str | Path, key: str, **arguments: Any) -> Any:
    """Import the function and call it; whatever it raises, leaving included, is one line.

    Raises:
        ConfigError: it cannot be imported, or raised.
    """
    function = load_factory(reference, source=source, key=key)
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        problem = f"the function raised {type(error).__name__}: {error}"
        raise ConfigError(problem, source=source, key=key, value=reference) from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for the file system
        return False
