"""``dsaccum audit``: what the installed DeepSpeed gets right and wrong, and whether a config is affected."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsaccum.cli.options import json_option, verbose_option
from dsaccum.cli.outcome import ExitCode, NotCarriedOut, exit_code_of, show
from dsaccum.cli.record_file import write_record
from dsaccum.report.new_files import check_new_files

if TYPE_CHECKING:
    from dsaccum.audit.record import AuditRecord


def audit_command(
    context: typer.Context,
    deepspeed: Annotated[
        Path | None, typer.Option("--deepspeed", metavar="FILE.json", help="Judge this DeepSpeed JSON too.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", metavar="W", help="Ranks. Default: 2, or as many as there are cores or GPUs."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", metavar="", help="Every combination: hours, not so that every pair of them comes up."),
    ] = False,
    json: Annotated[Path | None, json_option()] = None,
    verbose: Annotated[bool, verbose_option()] = False,
) -> int:
    """Try the installed DeepSpeed in many circumstances, called in the ways that people call it: minutes.

    Each cell is a small training run, verified as by dsaccum verify without remedies: right, wrong with its cause, or
    refused by DeepSpeed. Exit codes: 0 the config is in a good cell (without --deepspeed: no cell is wrong), 1 not so,
    2 the input is wrong, 3 could not be carried out.
    """

    def work() -> ExitCode:
        check_new_files({"--json": json})
        return _run(deepspeed, ranks, full, json, ("dsaccum", *context.obj), verbose=verbose)

    return exit_code_of(work, verbose=verbose)


def _run(
    deepspeed: Path | None,
    ranks: int | None,
    full: bool,
    record_path: Path | None,
    command: tuple[str, ...],
    *,
    verbose: bool,
) -> ExitCode:
    from dsaccum.engine.process import quiet_libraries
    from dsaccum.report.audit_matrix import print_audit
    from dsaccum.report.progress import shown_progress

    with shown_progress() as progress:
        progress.stage("loading torch and DeepSpeed")
        if not verbose:
            quiet_libraries()
        from dsaccum.audit.run import run_audit

        record = run_audit(progress, deepspeed=deepspeed, ranks=ranks, full=full, command=command)
    show(lambda: print_audit(record))
    if record_path is not None:
        write_record(record, record_path)
    return judged(record)


def judged(record: AuditRecord) -> ExitCode:
    """By the user's own config where there is one, else by all cells.

    Raises:
        NotCarriedOut: nobody knows.
    """
    if record.own is None:
        return ExitCode.NOT_EQUIVALENT if record.summary.wrong else ExitCode.EQUIVALENT
    if record.own.good is None:
        raise NotCarriedOut("there is no verdict on the plain ways of calling DeepSpeed with this config")
    return ExitCode.EQUIVALENT if record.own.good else ExitCode.NOT_EQUIVALENT
