"""``dsaccum faults``: the known faults, and how many of them a verification catches and names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsaccum.cli.options import verbose_option
from dsaccum.cli.outcome import ExitCode, exit_code_of, show
from dsaccum.cli.record_file import write_record
from dsaccum.config.errors import ConfigError
from dsaccum.report.new_files import check_new_files


def faults_command(
    context: typer.Context,
    run: Annotated[
        bool, typer.Option("--run", metavar="", help="Put every fault in, on real ranks, and see it found: minutes.")
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full", metavar="", help="With --run: in every setting, not so that every pair of circumstances comes up."
        ),
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="OUT.json", help="With --run: write the record to a new file.")
    ] = None,
    verbose: Annotated[bool, verbose_option()] = False,
) -> int:
    """List the known faults of gradient accumulation; with --run, show which of them are caught and rightly named.

    Beside it, whether the usual check sees them: comparing parameters after some steps of AdamW. Exit codes: 0 all are
    caught and none is called by a wrong name, 1 not so, 3 could not be carried out.
    """

    def work() -> ExitCode:
        if not run:
            for flag, given in (("--full", full), ("--json", json)):
                if given:
                    raise ConfigError("needs --run", source=flag, fix=f"dsaccum faults --run {flag}")
            return _list()
        check_new_files({"--json": json})
        return _run(full, json, ("dsaccum", *context.obj), verbose=verbose)

    return exit_code_of(work, verbose=verbose)


def _list() -> ExitCode:
    from dsaccum.report.fault_matrix import print_faults
    from dsaccum.verification.diagnosis.causes import ADVICE, UNKNOWN  # the faults themselves would load torch

    show(lambda: print_faults({name: advice.summary for name, advice in ADVICE.items() if name != UNKNOWN}))
    return ExitCode.EQUIVALENT


def _run(full: bool, record_path: Path | None, command: tuple[str, ...], *, verbose: bool) -> ExitCode:
    from dsaccum.engine.process import quiet_libraries
    from dsaccum.report.fault_matrix import is_sound, print_matrix
    from dsaccum.report.progress import shown_progress

    with shown_progress() as progress:
        progress.stage("loading torch and DeepSpeed")
        if not verbose:
            quiet_libraries()
        from dsaccum.power.matrix import run_matrix

        record = run_matrix(progress, full=full, command=command)
    show(lambda: print_matrix(record))
    if record_path is not None:
        write_record(record, record_path)
    return ExitCode.EQUIVALENT if is_sound(record) else ExitCode.NOT_EQUIVALENT
