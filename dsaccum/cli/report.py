"""``dsaccum report``: records and training runs as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsaccum.cli.outcome import ExitCode, exit_code_of, show
from dsaccum.cli.record_file import write_page
from dsaccum.config.errors import ConfigError
from dsaccum.report.new_files import check_new_files


def report_command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RECORD_OR_RUN...", help="Records (--json of a command), directories of training runs."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.html", help="The page, a new file. Required.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", metavar="", help="Tracebacks of what nobody foresaw.")] = False,
) -> int:
    """Make one HTML page of records and training runs: it needs no network and nothing beside it.

    Verdicts and causes come first, then what each record holds, with figures; versions come last. Exit codes: 0
    written, whatever the verdicts are; 2 the input is wrong; 3 could not be carried out.
    """

    def work() -> ExitCode:
        if not paths:
            raise ConfigError("no record was given", source="report", fix="dsaccum report verify.json -o report.html")
        if output is None:
            raise ConfigError("no file to write was given", source="--output", fix="-o report.html")
        check_new_files({"--output": output})
        return _write(paths, output)

    return exit_code_of(work, verbose=verbose)


def _write(paths: list[Path], output: Path) -> ExitCode:
    from dsaccum.cli.reading import read_record

    records = {str(path): read_record(path) for path in paths}
    write_page(records, output)
    show(lambda: typer.echo(f"written to {output}"))
    return ExitCode.EQUIVALENT
