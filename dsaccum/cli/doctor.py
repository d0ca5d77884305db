"""``dsaccum doctor``: what was found on this machine, and the fix for each problem."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsaccum.cli.options import json_option
from dsaccum.cli.outcome import ExitCode, exit_code_of, show
from dsaccum.cli.record_file import write_record
from dsaccum.report.new_files import check_new_files

if TYPE_CHECKING:
    from dsaccum.doctor.finding import Finding


def doctor_command(
    context: typer.Context,
    json: Annotated[Path | None, json_option()] = None,
    verbose: Annotated[bool, typer.Option("--verbose", metavar="", help="Tracebacks of what nobody foresaw.")] = False,
) -> int:
    """Look at this machine for what makes training or verifying fail, and show the fix for each problem.

    Nothing is changed. Exit codes: 0 no problem, 1 a problem, 2 a flag is wrong, 3 could not be carried out.
    """

    def work() -> ExitCode:
        check_new_files({"--json": json})
        return _examine_and_report(json, ("dsaccum", *context.obj))

    return exit_code_of(work, verbose=verbose)


def _examine_and_report(record_path: Path | None, command: Sequence[str]) -> ExitCode:
    from dsaccum.doctor.examination import examine
    from dsaccum.doctor.machine import Machine
    from dsaccum.doctor.table import print_findings

    began = time.perf_counter()
    findings = examine(Machine())
    took = time.perf_counter() - began
    show(lambda: print_findings(findings))
    has_problem = any(finding.state == "problem" for finding in findings)
    if record_path is not None:
        _write(findings, record_path, command, took, has_problem=has_problem)
    return ExitCode.NOT_EQUIVALENT if has_problem else ExitCode.EQUIVALENT


def _write(findings: Sequence[Finding], path: Path, command: Sequence[str], took: float, *, has_problem: bool) -> None:
    from dsaccum.doctor.packages import installed_versions
    from dsaccum.doctor.record import DoctorRecord, FindingRecord

    record = DoctorRecord(
        verdict="problem" if has_problem else "ok",
        findings=[FindingRecord.of(finding) for finding in findings],
        versions=installed_versions(),
        command=list(command),
        elapsed_s=took,
    )
    write_record(record, path)
