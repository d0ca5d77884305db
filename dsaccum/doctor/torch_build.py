"""What the installed torch was built for, from its files: importing it takes seconds."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path


@dataclass(frozen=True)
class TorchBuild:
    """The torch that ``import torch`` would load.

    Args:
        folder: of the package.
        version: with its local part, such as ``2.13.0+cpu``.
        cuda: the CUDA version that it was built for, if any.
        hip: the ROCm version that it was built for, if any.
    """

    folder: Path
    version: str
    cuda: str | None
    hip: str | None

    @classmethod
    def installed(cls) -> TorchBuild | None:
        """None where there is no torch, or none that can be read."""
        folder = package_folder("torch")
        if folder is None:
            return None
        try:
            values = _constants((folder / "version.py").read_text(encoding="utf-8"))
        except (OSError, SyntaxError):
            return None
        return cls(folder, values.get("__version__") or "", values.get("cuda"), values.get("hip"))

    @property
    def name(self) -> str:
        """``a CUDA 13.0 build``."""
        if self.cuda:
            return f"a CUDA {self.cuda} build"
        return f"a ROCm {self.hip} build" if self.hip else "a CPU build"

    @property
    def tag(self) -> str:
        """How torch names a folder of compiled extensions: ``cpu``, ``cu130``."""
        if self.hip:
            return f"rocm{self.hip.replace('.', '')}"
        return f"cu{self.cuda.replace('.', '')}" if self.cuda else "cpu"


def package_folder(name: str) -> Path | None:
    """Where a package would be imported from."""
    spec = PathFinder.find_spec(name)  # not importlib.util's, which answers with what is loaded already
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _constants(source: str) -> dict[str, str | None]:
    """Names that a module gives a text or None, at its top level."""
    values: dict[str, str | None] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            value = node.value.value
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            values |= dict.fromkeys(names, value if isinstance(value, str) else None)
    return values
