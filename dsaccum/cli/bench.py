"""``dsaccum bench``: memory, time and equality of the update over ways to split one batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsaccum.bench.arguments import BenchArguments, parse_steps
from dsaccum.cli.options import experiment_option, json_option, overrides_option, ranks_option, verbose_option
from dsaccum.cli.outcome import ExitCode, NotCarriedOut, exit_code_of, show
from dsaccum.cli.record_file import write_plot, write_record
from dsaccum.cli.verify import read_early
from dsaccum.config.errors import ConfigError
from dsaccum.report.new_files import check_new_files

if TYPE_CHECKING:
    from dsaccum.bench.record import BenchRecord

_SUBJECT, _RIGOUR, _OUTPUT = "What is measured", "How long", "Output"


def bench_command(
    context: typer.Context,
    deepspeed: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="DeepSpeed JSON; its batch is what is split. Required.", rich_help_panel=_SUBJECT
        ),
    ] = None,
    experiment: Annotated[
        Path | None,
        experiment_option(_SUBJECT),
    ] = None,
    accum_steps: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="The N to try; 1, 2, 4, ... if left out.", rich_help_panel=_SUBJECT),
    ] = None,
    ranks: Annotated[
        int | None,
        ranks_option(_SUBJECT),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        overrides_option(_SUBJECT),
    ] = None,
    rounds: Annotated[
        int, typer.Option(metavar="R", help="Each N is run once in each.", rich_help_panel=_RIGOUR)
    ] = BenchArguments.rounds,
    windows: Annotated[
        int, typer.Option(metavar="K", help="Optimizer steps timed in a round.", rich_help_panel=_RIGOUR)
    ] = BenchArguments.windows,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Show what would be run.", rich_help_panel=_RIGOUR)
    ] = False,
    label: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="Keep the record as bench-results/LABEL.json.", rich_help_panel=_OUTPUT),
    ] = None,
    json: Annotated[
        Path | None,
        json_option(_OUTPUT),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="OUT.png", help="Draw memory and time over N, to a new file.", rich_help_panel=_OUTPUT),
    ] = None,
    verbose: Annotated[
        bool,
        verbose_option(_OUTPUT),
    ] = False,
) -> int:
    """Measure what accumulation saves in memory and costs in time, over ways to split one effective batch.

    Exit codes: 0 measured, and the updates are equal; 1 an update differs; 2 the input is wrong; 3 could not be
    carried out.
    """

    def work() -> ExitCode:
        if deepspeed is None:
            problem = "no DeepSpeed JSON was given"
            raise ConfigError(problem, source="--deepspeed", fix="--deepspeed ds_configs/accum4.json")
        arguments = BenchArguments(
            deepspeed=deepspeed,
            experiment=experiment,
            accumulation_steps=() if accum_steps is None else parse_steps(accum_steps),
            ranks=ranks,
            rounds=rounds,
            windows=windows,
            label=label,
            overrides=tuple(overrides or ()),
            verbose=verbose,
            command=("dsaccum", *context.obj),
        )
        if arguments.labelled is not None and not dry_run:
            arguments.labelled.parent.mkdir(exist_ok=True)
            check_new_files({"--label": arguments.labelled})
        check_new_files({"--json": json, "--plot": plot})
        read_early(deepspeed, experiment)
        return _show_plan(arguments) if dry_run else _run(arguments, json, plot)

    return exit_code_of(work, verbose=verbose)


def _show_plan(arguments: BenchArguments) -> ExitCode:
    from dsaccum.engine.process import quiet_libraries
    from dsaccum.report.progress import shown_progress

    with shown_progress() as progress:
        progress.stage("reading config, data and model")
        quiet_libraries()
        from dsaccum.bench.run import prepare
        from dsaccum.bench.table import print_plan

        prepared = prepare(arguments)
    show(lambda: print_plan(prepared))
    return ExitCode.EQUIVALENT


def _run(arguments: BenchArguments, record_path: Path | None, plot_path: Path | None) -> ExitCode:
    from dsaccum.engine.process import quiet_libraries
    from dsaccum.report.progress import shown_progress

    with shown_progress() as progress:
        progress.stage("loading torch and DeepSpeed")
        if not arguments.verbose:
            quiet_libraries()
        from dsaccum.bench.run import bench

        record = bench(arguments, progress)
    from dsaccum.bench.table import print_bench

    for path in (arguments.labelled, record_path):  # first, so that nothing of it is lost
        if path is not None:
            write_record(record, path)
    show(lambda: print_bench(record))
    if plot_path is not None:
        write_plot(record, plot_path)
    return _judged(record)


def _judged(record: BenchRecord) -> ExitCode:
    if record.word == "reject":
        return ExitCode.NOT_EQUIVALENT
    if record.word is None:
        failures = [f"N = {each.accumulation_steps}: {each.failure}" for each in record.candidates if each.failure]
        raise NotCarriedOut("; ".join([record.reason, *failures]))
    return ExitCode.EQUIVALENT
