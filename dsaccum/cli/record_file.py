"""``--json OUT.json`` and ``--html OUT.html``: a record and a report in new files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dsaccum.cli.outcome import NotCarriedOut

if TYPE_CHECKING:
    from dsaccum.bench.record import BenchRecord
    from dsaccum.records import Record


def write_record(record: Record, path: Path) -> None:
    """Write it.

    Raises:
        NotCarriedOut: it could not be written after all.
    """
    with _written("record", path):
        record.write(path)


def write_report(record: Record, path: Path) -> None:
    """Write it as HTML.

    Raises:
        NotCarriedOut: it could not be written after all.
    """
    from dsaccum.report.html import write_html

    with _written("report", path):
        write_html(record, path)


def write_page(records: Mapping[str, Record], path: Path) -> None:
    """Write several as one page of HTML.

    Raises:
        NotCarriedOut: it could not be written after all.
    """
    from dsaccum.records import write_new
    from dsaccum.report.html import as_one_page

    with _written("report", path):
        write_new(path, as_one_page(records))


def write_plot(record: BenchRecord, path: Path) -> None:
    """Draw it.

    Raises:
        NotCarriedOut: it could not be written after all.
    """
    from dsaccum.bench.plot import draw

    with _written("plot", path):
        draw(record, path)


@contextmanager
def _written(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotCarriedOut(f"the {what} could not be written to {path}: {error.strerror or error}") from error
