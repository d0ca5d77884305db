"""``dsaccum plan``: what fits into a given memory, at which price; a DeepSpeed JSON that carries it out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from dsaccum import __version__
from dsaccum.cli.options import html_option, json_option, overrides_option
from dsaccum.cli.outcome import ExitCode, NotCarriedOut, exit_code_of, show
from dsaccum.cli.record_file import write_record, write_report
from dsaccum.config.errors import ConfigError
from dsaccum.planning.flags import PlanFlags, parse_memory
from dsaccum.report.new_files import check_new_files

_Value = TypeVar("_Value")
_SUBJECT, _ROOM, _OUTPUT = "What is planned", "Room", "Output"


def plan_command(
    context: typer.Context,
    experiment: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="Experiment: model, data, loss. Required.", rich_help_panel=_SUBJECT),
    ] = None,
    effective_batch: Annotated[
        int | None,
        typer.Option(metavar="E", help="Samples of one optimizer step. Required.", rich_help_panel=_SUBJECT),
    ] = None,
    deepspeed: Annotated[
        Path | None,
        typer.Option(
            "--deepspeed",
            metavar="BASE.json",
            help="DeepSpeed JSON to start from. Default: fp32, at the lowest ZeRO stage that fits.",
            rich_help_panel=_SUBJECT,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        overrides_option(_SUBJECT),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="W", help="Data-parallel ranks. Required.", rich_help_panel=_ROOM)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="24GiB", help="For tensors, on each rank. Required.", rich_help_panel=_ROOM),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda", help="Where it would run. Default: as on this machine.", rich_help_panel=_ROOM
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write", metavar="OUT.json", help="Write the DeepSpeed JSON to a new file.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    json: Annotated[
        Path | None,
        json_option(_OUTPUT),
    ] = None,
    html: Annotated[
        Path | None,
        html_option(_OUTPUT),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", metavar="", help="What libraries say, and tracebacks.", rich_help_panel=_OUTPUT),
    ] = False,
) -> int:
    """Find the largest micro-batch that fits into memory, and what else would; nothing is allocated.

    Exit codes: 0 it fits, 1 it does not, 2 the input is wrong, 3 could not be carried out.
    """

    def work() -> ExitCode:
        from dsaccum.config.reading import read_json_object, read_yaml_mapping

        yaml = _given("--experiment", experiment, "--experiment launch/experiments/llama-nano.yaml")
        total = _given("--effective-batch", effective_batch, "--effective-batch 512")
        world_size = _given("--ranks", ranks, "--ranks 8")
        size = parse_memory(_given("--memory", memory, "--memory 24GiB"), key="--memory")
        if device not in (None, "cpu", "cuda"):
            raise ConfigError("is no device", key="--device", value=device, allowed="cpu or cuda", fix="--device cuda")
        check_new_files({"--write": write, "--json": json, "--html": html})
        read_yaml_mapping(yaml)  # before torch is loaded, which takes seconds
        if deepspeed is not None:
            read_json_object(deepspeed)
        flags = PlanFlags(
            experiment=yaml,
            effective_batch=total,
            ranks=world_size,
            memory=size,
            deepspeed=deepspeed,
            device=device,
            overrides=tuple(overrides or ()),
            command=("dsaccum", *context.obj),
            version=__version__,
        )
        return _plan_and_report(flags, write, json, html, verbose=verbose)

    return exit_code_of(work, verbose=verbose)


def _given(flag: str, value: _Value | None, example: str) -> _Value:
    if value is None:
        raise ConfigError("is missing", source=flag, fix=example)
    return value


def _plan_and_report(
    flags: PlanFlags, write: Path | None, record_path: Path | None, html_path: Path | None, *, verbose: bool
) -> ExitCode:
    from dsaccum.engine.process import quiet_libraries
    from dsaccum.report.plan import print_plan
    from dsaccum.report.progress import shown_progress

    with shown_progress() as progress:
        progress.stage("loading torch")
        if not verbose:
            quiet_libraries()
        from dsaccum.planning.plan import make_plan

        plan = make_plan(flags, progress.stage)
    record = plan.record
    if write is not None and plan.config is not None:
        _write_config(plan.config, write)
        record = record.model_copy(update={"written": str(write)})
    show(lambda: print_plan(record))
    if record_path is not None:
        write_record(record, record_path)
    if html_path is not None:
        write_report(record, html_path)
    return ExitCode.EQUIVALENT if record.fits else ExitCode.NOT_EQUIVALENT


def _write_config(config: dict[str, Any], path: Path) -> None:
    from dsaccum.planning.base_config import as_text
    from dsaccum.records import write_new

    try:
        write_new(path, as_text(config))
    except OSError as error:
        raise NotCarriedOut(f"the config could not be written to {path}: {error.strerror or error}") from error
