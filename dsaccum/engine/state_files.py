"""An engine's whole state to files and back, through DeepSpeed's own checkpoints.

Three things are ours. A file that cannot be written is noted, not raised: DeepSpeed would leave the ranks that wait for
it waiting. Files are written when DeepSpeed's part is over: it has ranks wait in collectives, which give up on one that
writes to a slow disk. And nothing but tensors and DeepSpeed's own few classes is unpickled, though DeepSpeed asks for
anything.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, cast

import torch

from dsaccum.durable import DurableFile, Written

TAG: Final = "state"
"""DeepSpeed's name for the directory that it writes into."""
UNIVERSAL_TAG: Final = "universal"
UNIVERSAL: Final = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
"""Without it in the client state, DeepSpeed converts no checkpoint for another number of ranks."""
_FORCE: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_CLASSES: Final = [
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
]
"""What DeepSpeed's checkpoints hold beside tensors and containers."""


class StateFiles:
    """What this rank wrote.

    Attributes:
        written: by path.
        error: the first that went wrong.
    """

    def __init__(self, moved: Callable[[], None] = lambda: None) -> None:
        self.written: dict[Path, Written] = {}
        self.error: Exception | None = None
        self._moved = moved

    def save(self, state: Any, path: str | os.PathLike[str]) -> None:
        """``torch.save`` to a file that has reached the disk afterwards, unless one before it failed."""
        if self.error is not None:
            return
        file = None
        try:
            with DurableFile(path, self._moved) as file:
                torch.save(state, cast(IO[bytes], file))
            self.written[Path(path)] = file.written
        except Exception as error:
            self.error = (file.error if file is not None else None) or error

    def make_directory(self, path: str, exist_ok: bool = True) -> None:
        """As ``os.makedirs``."""
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self.error = self.error or error


def save_state(engine: Any, directory: Path, files: StateFiles) -> None:
    """Write parameters, optimizer, schedule, loss scale and counters; look at ``files.error``. A collective at first.

    Ranks come back as each has written its own files.

    At a window's boundary only: DeepSpeed does not save half a window.

    Args:
        engine: DeepSpeed's.
        directory: that exists, the same one on all ranks.
        files: is told what this rank wrote.
    """
    writer = engine.checkpoint_engine
    pending: list[tuple[Any, str | os.PathLike[str]]] = []  # states by reference, which nothing changes till then
    with (
        _own(writer, "save", lambda state_dict, path: pending.append((state_dict, path))),
        _own(writer, "makedirs", files.make_directory),
        _own(engine, "_copy_recovery_script", lambda *_: None),  # it stands in DeepSpeed itself
    ):
        engine.save_checkpoint(str(directory), tag=TAG, client_state=UNIVERSAL, save_latest=False)
    for state, path in pending:
        files.save(state, path)


def load_state(engine: Any, directory: Path, *, universal: bool) -> None:
    """Take over what ``save_state`` wrote. A collective.

    Args:
        engine: DeepSpeed's, new.
        directory: as it was saved.
        universal: from what ``convert`` made, for another number of ranks; its config must say ``load_universal``.

    Raises:
        pickle.UnpicklingError: a file holds what no checkpoint of ours holds.
        RuntimeError: DeepSpeed found nothing to load.
    """
    with only_known_classes():
        found, _ = engine.load_checkpoint(str(directory), tag=UNIVERSAL_TAG if universal else TAG)
    if found is None:
        raise RuntimeError(f"DeepSpeed found no checkpoint in {directory}")


def convert(directory: Path) -> None:
    """Make a universal checkpoint beside it, from which any number of ranks can go on (ZeRO 1 to 3). One rank does.

    Raises:
        Exception: whatever DeepSpeed's converter raises.
    """
    from argparse import Namespace

    from deepspeed.checkpoint.ds_to_universal import main

    with only_known_classes():
        main(
            Namespace(
                input_folder=str(directory / TAG), output_folder=str(directory / UNIVERSAL_TAG), num_extract_workers=1,
                num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False,
            )
        )  # fmt: skip


@contextmanager
def only_known_classes() -> Iterator[None]:
    """Inside, ``torch.load`` makes tensors, containers and DeepSpeed's own classes, whatever its caller asks for."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        with torch.serialization.safe_globals(_known()):
            yield
    finally:
        del os.environ[_FORCE]
        if before is not None:
            os.environ[_FORCE] = before


@contextmanager
def _own(target: Any, name: str, value: Any) -> Iterator[None]:
    """An instance's attribute in place of its class's."""
    setattr(target, name, value)
    try:
        yield
    finally:
        delattr(target, name)


def _known() -> list[Any]:
    found = []
    for module, name in _CLASSES:
        try:
            found.append(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError):  # another version of DeepSpeed
            continue
    return found
