"""From a path on the command line to the record that it holds, or one line on why it holds none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dsaccum.audit.record import AuditRecord
from dsaccum.bench.record import BenchRecord
from dsaccum.config.errors import ConfigError, located_in, nearest
from dsaccum.config.reading import read_json_object
from dsaccum.planning.record import PlanRecord
from dsaccum.power.record import FaultsRecord
from dsaccum.records import Record
from dsaccum.report.other_record import OtherRecord
from dsaccum.report.train_run import TrainRecord, read_steps
from dsaccum.training.run_directory import RECORD, RunDirectory
from dsaccum.verification.records.record import VerifyRecord
from dsaccum.verification.records.watch import WatchRecord

RECORDS: dict[str, type[Record]] = {
    "dsaccum.verify/1": VerifyRecord,
    "dsaccum.watch/1": WatchRecord,
    "dsaccum.faults/1": FaultsRecord,
    "dsaccum.audit/1": AuditRecord,
    "dsaccum.bench/1": BenchRecord,
    "dsaccum.train/1": TrainRecord,
    "dsaccum.plan/1": PlanRecord,
    "dsaccum.doctor/1": OtherRecord,
}
"""Each has a template in ``dsaccum.report.html``."""
_ALLOWED = f"a training run's directory, or a record: {', '.join(RECORDS)}"


def read_record(path: Path) -> Record:
    """The record in a file, or in the directory of a training run.

    Raises:
        ConfigError: there is none that can be read.
    """
    file = path / RECORD if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise ConfigError(f"is no run: it holds no {RECORD}", source=path, allowed=_ALLOWED, fix="name a file in it")
    content = read_json_object(file)
    with _told_of(file):
        record = _record_of(content).model_validate(content)
    if not isinstance(record, TrainRecord):
        return record
    metrics = RunDirectory(file.parent).metrics
    with _told_of(metrics):
        return record.model_copy(update={"steps": read_steps(metrics)})


def _record_of(content: dict[str, Any]) -> type[Record]:
    schema = content.get("schema")
    if isinstance(schema, str) and schema in RECORDS:
        return RECORDS[schema]
    if schema is None:
        raise ConfigError("is no record: it has no such key", key="schema", allowed=_ALLOWED, fix="name another file")
    guess = nearest(str(schema), RECORDS)
    fix = f'"schema": "{guess}", if it was changed by hand' if guess else "name another file"
    raise ConfigError("is no schema that has a report", key="schema", value=schema, allowed=_ALLOWED, fix=fix)


@contextmanager
def _told_of(file: Path) -> Iterator[None]:
    """What is wrong in a file, as the one line of all commands."""
    try:
        with located_in(file):
            yield
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", source=file, fix="name another file") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or None
        problem = f"is not what its schema says: {first['msg']}"
        fix = "make the record again: it was changed, or another version wrote it"
        raise ConfigError(problem, source=file, key=key, fix=fix) from None
