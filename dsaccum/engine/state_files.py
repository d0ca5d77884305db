"""An engine's whole state to files and back, through DeepSpeed's own checkpoints.

Three things are ours. A file that cannot be written is noted, not raised: DeepSpeed would leave the ranks that wait for
it waiting. Files are written when DeepSpeed's part is over: it has ranks wait in collectives, which give up on one that
writes to a slow disk. And nothing but tensors and DeepSpeed's own few classes is unpickled, though DeepSpeed asks for
anything.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, cast

import torch

from dsaccum.durable import DurableFile, Written, make_durable

TAG: Final = "state"
"""DeepSpeed's name for the directory that it writes into."""
AT_ONCE: Final = 32
"""Files that are open at most: a rank that writes one for each expert would run out of handles."""
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
    """What this rank writes. Nothing is on the disk for certain before ``reach_disk``.

    Attributes:
        written: by path.
        error: the first that went wrong.
    """

    def __init__(self, moved: Callable[[], None] = lambda: None) -> None:
        self.written: dict[Path, Written] = {}
        self.error: Exception | None = None
        self._moved = moved
        self._open: list[DurableFile] = []

    def save(self, state: Any, path: str | os.PathLike[str]) -> None:
        """``torch.save``, unless one before it failed."""
        told = torch.serialization.get_crc32_options()
        self._write(path, lambda file: torch.save(state, cast(IO[bytes], file)), zipped=told)

    def write(self, path: Path, content: bytes) -> None:
        """As it is, unless one before it failed."""
        self._write(path, lambda file: file.write(content))

    def make_directory(self, path: str, exist_ok: bool = True) -> None:
        """As ``os.makedirs``."""
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self.error = self.error or error

    def reach_disk(self, directories: Iterable[Path] = ()) -> None:
        """Wait until all files, and these directories' entries, have; at once, as a file system waits once for all."""
        waits: list[Callable[[], None]] = [file.reach_disk for file in self._open]
        waits += [partial(make_durable, directory) for directory in directories]
        if self.error is None and waits:
            with ThreadPoolExecutor(min(len(waits), AT_ONCE)) as pool:
                errors = [wait.exception() for wait in [pool.submit(wait) for wait in waits]]
            self.error = next((error for error in errors if isinstance(error, Exception)), None)
        self._close()

    def _write(
        self, path: str | os.PathLike[str], fill: Callable[[DurableFile], object], *, zipped: bool = False
    ) -> None:
        if len(self._open) == AT_ONCE:
            self.reach_disk()
        if self.error is not None:
            return
        file = None
        try:
            file = DurableFile(path, self._moved, zipped=zipped)
            self._open.append(file)
            fill(file)
            self.written[Path(path)] = file.written
        except Exception as error:
            self.error = (file.error if file is not None else None) or error
            self._close()

    def _close(self) -> None:
        for file in self._open:
            file.close()
        self._open.clear()


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
