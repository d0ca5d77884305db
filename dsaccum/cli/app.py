"""The command line: commands, ``--version``, and how a mistake in it is said."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from dsaccum import __version__
from dsaccum.cli.audit import audit_command
from dsaccum.cli.bench import bench_command
from dsaccum.cli.doctor import doctor_command
from dsaccum.cli.faults import faults_command
from dsaccum.cli.outcome import refuse
from dsaccum.cli.plan import plan_command
from dsaccum.cli.report import report_command
from dsaccum.cli.usage import as_config_error, in_one_spelling, is_usage_error
from dsaccum.cli.verify import verify_command
from dsaccum.config.errors import ConfigError
from dsaccum.engine.process import let_idle_threads_sleep

app = typer.Typer(
    help="Train GPT models with DeepSpeed at any effective batch, and prove that accumulation changed nothing.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("verify")(verify_command)
app.command("faults")(faults_command)
app.command("audit")(audit_command)
app.command("bench")(bench_command)
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)
app.command("report")(report_command)


@app.callback(invoke_without_command=True)
def _dsaccum(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"dsaccum {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(words: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (``ExitCode``).

    Args:
        words: the command line without the program's name; that of this process if left out.
    """
    _open_streams()
    let_idle_threads_sleep()
    given = sys.argv[1:] if words is None else words
    command = typer.main.get_command(app)
    try:
        return int(
            command(args=in_one_spelling(given), prog_name="dsaccum", standalone_mode=False, obj=list(given)) or 0
        )
    except ConfigError as error:
        return refuse(error)
    except Exception as error:
        if not is_usage_error(error):
            raise
        return refuse(as_config_error(error, given))


def _open_streams() -> None:
    """Make stdout and stderr safe to write to: closed ones lead nowhere, and no character can break a report."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open to the end of the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
