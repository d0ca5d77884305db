"""Something to do as soon as a script has imported a module; nothing at all if it never does."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport(MetaPathFinder):
    """First in ``sys.meta_path``, it lets the others find the module, and acts once it is loaded.

    Args:
        name: of the module.
        act: is given it.
    """

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The others' spec, with a loader that acts afterwards."""
        if fullname != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        spec.loader = _Acting(spec.loader, self._act, self)
        return spec


class _Acting(Loader):
    """A module's own loader, and what is done after it."""

    def __init__(self, own: Loader, act: Callable[[ModuleType], None], finder: AfterImport) -> None:
        self._own, self._act, self._finder = own, act, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As it would be."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Load, put everything back, act."""
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._own
        module.__loader__ = self._own
        self._own.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._act(module)
