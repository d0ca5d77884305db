"""What a verdict depends on, as one number: config, model, ranks, versions, and the code as it stands in memory.

The code counts, not only its version: a DeepSpeed that was edited in place, or patched by the script that starts the
run, is another DeepSpeed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import torch

CODE: Final = ("deepspeed", "dsaccum", "torch.nn.modules", "torch.optim", "transformers.models")
"""Packages whose functions count."""
MODULES: Final = {
    *("torch", "torch._tensor", "torch.autograd", "torch.distributed", "torch.distributed.distributed_c10d"),
    *("torch.nn", "torch.nn.functional", "torch.nn.utils", "torch.nn.utils.clip_grad", "torch.amp.autocast_mode"),
}
"""Single modules whose functions count, too."""
CLASSES: Final = (torch.Tensor,)
"""Classes that say they are at home elsewhere."""
_INSTALLED: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def fingerprint(circumstances: Any) -> str:
    """A hexadecimal number that changes with the circumstances, and with the code that is loaded.

    Args:
        circumstances: JSON types only.
    """
    digest = hashlib.sha256(json.dumps(circumstances, sort_keys=True).encode())
    for path in _own_files():
        digest.update(path.read_bytes())
    known: dict[int, bytes] = {}  # by identity: one function stands under many names
    for name, code in _loaded_code():
        if isinstance(code, CodeType) and id(code) not in known:
            known[id(code)] = _code_digest(code)
        digest.update(name.encode())
        digest.update(known[id(code)] if isinstance(code, CodeType) else code.encode())
    return digest.hexdigest()[:32]


def _loaded_code() -> Iterator[tuple[str, CodeType | str]]:
    """What stands under each name: a function's code; a class's own name, and its functions where it is at home."""
    for module_name, module in sorted(sys.modules.items()):
        package = any(module_name == name or module_name.startswith(f"{name}.") for name in CODE)
        if not (isinstance(module, ModuleType) and (package or module_name in MODULES)):
            continue
        for name, value in sorted(vars(module).items()):
            yield from _functions_of(f"{module_name}.{name}", value)
            if isinstance(value, type):
                yield f"{module_name}.{name}", f"{value.__module__}.{value.__qualname__}"
                if value.__module__ == module_name or value in CLASSES:
                    for member, each in sorted(vars(value).items()):
                        yield from _functions_of(f"{module_name}.{name}.{member}", each)


def _own_files() -> list[Path]:
    """The user's own: of factories, what these import, and the script. In them constants and defaults count, too."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    own = (Path(file) for file in files if file is not None and not file.startswith(_INSTALLED))
    return sorted(path for path in own if path.suffix == ".py" and path.is_file())


def _functions_of(name: str, value: Any) -> Iterator[tuple[str, CodeType]]:
    """Of a function, a method or a property, and of what it decorates."""
    if isinstance(value, FunctionType):
        yield name, value.__code__
        yield from _functions_of(name, getattr(value, "__wrapped__", None))
    elif isinstance(value, staticmethod | classmethod):
        yield from _functions_of(name, value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _functions_of(name, part)
    elif isinstance(value, cached_property):
        yield from _functions_of(name, value.func)


def _code_digest(code: CodeType) -> bytes:
    digest = hashlib.sha256(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_flags)).encode())
    for constant in code.co_consts:
        digest.update(_code_digest(constant) if isinstance(constant, CodeType) else _in_order(constant).encode())
    return digest.digest()


def _in_order(constant: object) -> str:
    """Sets have an order of their own in every process."""
    return repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)
