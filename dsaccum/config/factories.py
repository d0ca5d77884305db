"""``FILE.py:function``: the one place where a config may name code, for ``model.factory`` and ``loss.factory``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dsaccum.config.errors import ConfigError, nearest

_MODULE_PREFIX: Final = "_dsaccum_factory_"
_STATE: Final = "__dsaccum_state__"


def place_of(error: BaseException) -> str:
    """`` (at losses.py:24 in smoothed)``: the innermost line of a file that a config names; nothing where none is."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if str(trace.tb_frame.f_globals.get("__name__", "")).startswith(_MODULE_PREFIX):
            place = f" (at {Path(code.co_filename).name}:{trace.tb_lineno} in {code.co_name})"
        trace = trace.tb_next
    return place


def load_factory(reference: str, *, source: str | Path | None = None, key: str) -> Callable[..., Any]:
    """Import the function that ``reference`` names. Its file is executed: only name code that you trust.

    It is executed once, unless it has changed or is forgotten meanwhile: what it patches is patched once.

    Raises:
        ConfigError: the file is missing, cannot be executed, or has no such function.
    """
    path_text, _, name = reference.rpartition(":")
    path = Path(path_text)
    if not _is_file(path):
        raise ConfigError("there is no such file", source=source, key=key, value=reference, allowed="FILE.py:function")
    module = _executed_before(path) or _execute(path, reference, source=source, key=key)
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


def forget_factories() -> None:
    """Execute each file anew when it is named next: what its last use left in its globals is gone."""
    for name in [name for name in sys.modules if name.startswith(_MODULE_PREFIX)]:
        del sys.modules[name]


def _executed_before(path: Path) -> ModuleType | None:
    module = sys.modules.get(_module_name(path))
    return module if module is not None and getattr(module, _STATE, None) == _state(path) else None


def _execute(path: Path, reference: str, *, source: str | Path | None, key: str) -> ModuleType:
    module_name = _module_name(path)
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError("is not a Python file", source=source, key=key, value=reference, allowed="FILE.py:function")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    state = _state(path)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        problem = f"the file cannot be imported ({type(error).__name__}: {error})"
        raise ConfigError(problem, source=source, key=key, value=reference) from error
    setattr(module, _STATE, state)
    return module


def _module_name(path: Path) -> str:
    return f"{_MODULE_PREFIX}{path.stem}"


def _state(path: Path) -> tuple[str, bytes]:
    """Which file, and what stands in it."""
    return str(path.resolve()), path.read_bytes()


def call_factory(reference: str, *, source: str | Path | None = None, key: str, **arguments: Any) -> Any:
    """Import the function and call it; whatever it raises, leaving included, is one line.

    Raises:
        ConfigError: it cannot be imported, or raised.
    """
    function = load_factory(reference, source=source, key=key)
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        problem = f"the function raised {type(error).__name__}: {error}{place_of(error)}"
        raise ConfigError(problem, source=source, key=key, value=reference) from error


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for the file system
        return False
