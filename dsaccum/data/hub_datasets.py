"""Documents read through the ``datasets`` library: text and JSON-lines files, hub ids, saved data sets."""

from __future__ import annotations

import glob
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import DataConfig
from dsaccum.data.documents import Document, Documents
from dsaccum.data.local import is_missing_directory

_JSON_SUFFIXES: Final = (".json", ".jsonl")
_ALLOWED: Final = "a hub id or a local directory"
_NO_STREAMS: Final = "is a stream: samples are read in a seeded order, which needs random access; download it first"


def file_documents(config: DataConfig, source_file: str | Path) -> Documents:
    """Text files, one document each, then JSON-lines files, one document per row; each kind sorted by path.

    Raises:
        ConfigError: no file, a stream, text that isn't UTF-8, broken JSON, or no usable text column.
    """
    paths = _matching_files(config.files, source_file)
    texts = [path for path in paths if not path.endswith(_JSON_SUFFIXES)]
    # The library can't infer columns from an empty table; it has no row to give either.
    tables = [path for path in paths if path.endswith(_JSON_SUFFIXES) and Path(path).stat().st_size]
    documents = [Document(text) for text in _read_files("text", texts, "text", source_file)]
    documents += [Document(text) for text in _read_files("json", tables, config.column, source_file)]
    return Documents(documents, {"source": "files", "files": {path: Path(path).stat().st_size for path in paths}})


def dataset_documents(config: DataConfig, source_file: str | Path) -> Documents:
    """One split of a hub data set, of a directory of data files, or of a directory from ``save_to_disk``.

    Raises:
        ConfigError: not found or not reachable, no such split, or no usable text column.
    """
    with _quiet():
        dataset = _load_dataset(config, source_file)
    texts = _column(dataset, config.column, {"source": source_file, "key": "data.column", "value": config.column})
    origin = {"source": "dataset"} | {key: getattr(config, key) for key in ("dataset", "subset", "split", "column")}
    return Documents([Document(text) for text in texts], origin)


def _matching_files(patterns: list[str], source_file: str | Path) -> list[str]:
    found: set[str] = set()
    for pattern in patterns:
        place: dict[str, Any] = {"source": source_file, "key": "data.files", "value": pattern}
        matches = glob.glob(pattern, recursive=True)
        if "://" in pattern or any(_is_stream(Path(match)) for match in matches):
            raise ConfigError(_NO_STREAMS, **place)
        files = [match for match in matches if Path(match).is_file()]
        if not files:
            raise ConfigError(f"matches no file in {Path.cwd()}", **place, allowed="globs of text or .jsonl files")
        found.update(files)
    return sorted(found)


def _is_stream(path: Path) -> bool:
    return path.is_fifo() or path.is_char_device() or path.is_socket()


def _read_files(kind: str, paths: list[str], column: str, source_file: str | Path) -> list[str]:
    if not paths:
        return []
    # A cache of its own: files that change between two runs can't be served from the last run's copy.
    if kind == "json":
        _refuse_rows_without_fields(paths, source_file)
    with tempfile.TemporaryDirectory() as cache, _quiet():
        dataset = _load_files(kind, paths, cache, source_file)
        return _column(dataset, column, {"source": source_file, "key": "data.column", "value": column})


def _refuse_rows_without_fields(paths: list[str], source_file: str | Path) -> None:
    """A bare ``null`` as a row makes the library crash the whole process."""
    for path in paths:
        with open(path, "rb") as file:
            first = next((line.strip() for line in file if line.strip()), b"{")
            if first[:1] not in (b"{", b"["):
                raise ConfigError(
                    "holds no JSON objects",
                    source=source_file,
                    key="data.files",
                    value=path,
                    allowed="one object per line, or a list of objects",
                )


def _load_files(kind: str, paths: list[str], cache: str, source_file: str | Path) -> Any:
    from datasets import load_dataset

    options = {"sample_by": "document"} if kind == "text" else {}
    try:
        literal = [glob.escape(path) for path in paths]
        return load_dataset(kind, data_files=literal, split="train", cache_dir=cache, **options)
    except Exception as error:  # the library wraps some causes and lets others through
        if len(paths) > 1:
            for path in paths:
                _load_files(kind, [path], cache, source_file)  # raises for the file that is to blame
        problem = f"can't be read as {'UTF-8 text' if kind == 'text' else 'JSON lines'} ({_reason(error)})"
        value = paths if len(paths) > 1 else paths[0]
        raise ConfigError(problem, source=source_file, key="data.files", value=value) from error


def _load_dataset(config: DataConfig, source_file: str | Path) -> Any:
    assert config.dataset is not None  # DataConfig sees to it
    name = config.dataset
    place: dict[str, Any] = {"source": source_file, "key": "data.dataset", "value": name}
    if is_missing_directory(name):
        raise ConfigError("there is no such directory", **place, allowed=_ALLOWED)
    from datasets import DatasetDict, load_dataset, load_from_disk

    try:
        if not _is_saved(Path(name)):
            return load_dataset(name, config.subset, split=config.split)
        dataset = load_from_disk(name)
    except Exception as error:  # offline, not found, no such split, gated, broken files: the library's own words tell
        problem = f"split {config.split!r} can't be loaded ({_reason(error)})"
        raise ConfigError(problem, **place, allowed=_ALLOWED) from error
    splits = list(dataset) if isinstance(dataset, DatasetDict) else [str(dataset.split or "train")]
    if config.split not in splits:
        raise ConfigError(
            f"{name} has no such split",
            source=source_file,
            key="data.split",
            value=config.split,
            allowed=", ".join(splits),
        )
    return dataset[config.split] if isinstance(dataset, DatasetDict) else dataset


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _column(dataset: Any, column: str, place: dict[str, Any]) -> list[str]:
    if column not in dataset.column_names:
        raise ConfigError("there is no such column", **place, allowed=", ".join(dataset.column_names))
    kind = getattr(dataset.features[column], "dtype", type(dataset.features[column]).__name__)
    if kind not in ("string", "large_string"):
        raise ConfigError(f"the column holds {kind}", **place, allowed="a column of strings")
    texts = dataset.select_columns([column])[:][column]
    if None in texts:
        raise ConfigError(f"row {texts.index(None)} (from 0) is null", **place, allowed="a string in every row")
    return texts


def _reason(error: BaseException) -> str:
    # "An error occurred while generating the dataset" says nothing; what it wraps does.
    cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library from drawing progress bars, once per rank, and from logging errors that we report ourselves."""
    from datasets.utils import disable_progress_bars, enable_progress_bars, is_progress_bar_enabled, logging

    shown, verbosity = is_progress_bar_enabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            enable_progress_bars()
