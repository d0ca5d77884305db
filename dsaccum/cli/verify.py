"""``dsaccum verify``: flags in, report and record out, the verdict as exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsaccum.cli.options import (
    experiment_option,
    html_option,
    json_option,
    overrides_option,
    ranks_option,
    verbose_option,
)
from dsaccum.cli.outcome import ExitCode, NotCarriedOut, exit_code_of, show
from dsaccum.cli.record_file import write_record, write_report
from dsaccum.config.errors import ConfigError
from dsaccum.report.new_files import check_new_files
from dsaccum.verification.cases.arguments import MOST_STEPS, VerifyArguments
from dsaccum.verification.resumed.arguments import ResumeArguments

if TYPE_CHECKING:
    from dsaccum.verification.records.record import VerifyRecord

_SUBJECT, _CHANGES, _RIGOUR, _OUTPUT = "What is verified", "Changes for this run", "How strictly", "Output"


def verify_command(
    context: typer.Context,
    deepspeed: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="DeepSpeed JSON: how to step. Required.", rich_help_panel=_SUBJECT),
    ] = None,
    experiment: Annotated[
        Path | None,
        experiment_option(_SUBJECT),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            metavar="DIR",
            help="The next windows of the run in this directory, from its newest checkpoint, in any split of its "
            "effective batch; in place of --deepspeed and --experiment.",
            rich_help_panel=_SUBJECT,
        ),
    ] = None,
    loop: Annotated[
        str,
        typer.Option(
            metavar="LOOP",
            help="dsaccum; hf-labels (the model's own loss); outside-loss (from its logits); or FILE.py:function, "
            "where function(engine, micro_batch) gives the loss for engine.backward.",
            rich_help_panel=_SUBJECT,
        ),
    ] = "dsaccum",
    ranks: Annotated[
        int | None,
        ranks_option(_CHANGES),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="K", help=f"Optimizer steps, 1 to {MOST_STEPS}.", rich_help_panel=_CHANGES)
    ] = 3,
    accum_steps: Annotated[
        int | None, typer.Option(metavar="N", help="gradient_accumulation_steps.", rich_help_panel=_CHANGES)
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(metavar="B", help="train_micro_batch_size_per_gpu.", rich_help_panel=_CHANGES)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        overrides_option(_CHANGES),
    ] = None,
    inject: Annotated[
        str | None,
        typer.Option(
            metavar="FAULT",
            help="Put a known fault in, or your own (FILE.py:function), to see it found.",
            rich_help_panel=_RIGOUR,
        ),
    ] = None,
    no_remedies: Annotated[
        bool,
        typer.Option(
            "--no-remedies", metavar="", help="DeepSpeed as it is, its faults included.", rich_help_panel=_RIGOUR
        ),
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            metavar="",
            help="Exit with 3 if this machine could not run something, or a claim was untested.",
            rich_help_panel=_RIGOUR,
        ),
    ] = False,
    full_size: Annotated[
        bool,
        typer.Option(
            "--full-size",
            metavar="",
            help="Never shrink a large model, however long it takes.",
            rich_help_panel=_RIGOUR,
        ),
    ] = False,
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
        verbose_option(_OUTPUT),
    ] = False,
) -> int:
    """Prove, or refute, that N accumulated micro-batches give the update of one big batch.

    On your own config, model, data and installed DeepSpeed. Exit codes: 0 equivalent, 1 not equivalent, 2 the input is
    wrong, 3 could not be carried out.
    """

    def work() -> ExitCode:
        shared: dict[str, Any] = {
            "ranks": ranks,
            "steps": steps,
            "accumulation_steps": accum_steps,
            "micro_batch": micro_batch,
            "fault": inject,
            "remedies": not no_remedies,
            "strict": strict,
            "verbose": verbose,
            "command": ("dsaccum", *context.obj),
        }
        if resume is not None:
            from dsaccum.training.start import find_start

            own = {"--deepspeed": deepspeed, "--experiment": experiment, "--set": overrides}
            _refuse_beside_resume(own | {"--loop": loop if loop != "dsaccum" else None})
            check_new_files({"--json": json, "--html": html})
            find_start(str(resume), None)  # before torch is loaded: a mistyped name is answered at once
            return _verify_and_report(ResumeArguments(resume, **shared), json, html)
        if deepspeed is None:
            problem = "no DeepSpeed JSON was given"
            raise ConfigError(problem, source="--deepspeed", fix="--deepspeed ds_configs/accum4.json")
        arguments = VerifyArguments(
            deepspeed=deepspeed,
            experiment=experiment,
            loop=loop,
            full_size=full_size,
            overrides=tuple(overrides or ()),
            **shared,
        )
        check_new_files({"--json": json, "--html": html})
        read_early(deepspeed, experiment)
        return _verify_and_report(arguments, json, html)

    return exit_code_of(work, verbose=verbose)


def _refuse_beside_resume(given: dict[str, object]) -> None:
    for flag, value in given.items():
        if value:
            problem = "cannot be given with --resume: the run's own configs and loop are verified"
            raise ConfigError(problem, source=flag, fix=f"leave {flag} out")


def _verify_and_report(
    arguments: VerifyArguments | ResumeArguments, record_path: Path | None, html_path: Path | None
) -> ExitCode:
    from dsaccum.engine.process import quiet_libraries
    from dsaccum.report.progress import shown_progress

    with shown_progress() as progress:
        progress.stage("loading torch and DeepSpeed")
        if not arguments.verbose:
            quiet_libraries()
        if isinstance(arguments, ResumeArguments):
            from dsaccum.verification.resumed.verify import verify_resumed

            record = verify_resumed(arguments, progress)
        else:
            from dsaccum.verification.verify import verify

            record = verify(arguments, progress)
    from dsaccum.report.terminal import print_report

    show(lambda: print_report(record))
    if record_path is not None:
        write_record(record, record_path)
    if html_path is not None:
        write_report(record, html_path)
    return _judged(record, strict=arguments.strict)


def _judged(record: VerifyRecord, *, strict: bool) -> ExitCode:
    """A difference that was found stands, whatever else was substituted or left open."""
    if record.verdict == "not_equivalent":
        return ExitCode.NOT_EQUIVALENT
    if record.verdict is None:
        raise NotCarriedOut(f"there is no verdict: {record.why_undecided()}")
    if strict and (open_questions := record.open_questions()):
        raise NotCarriedOut(f"--strict: {'; '.join(open_questions)}")
    return ExitCode.EQUIVALENT


def read_early(deepspeed: Path, experiment: Path | None) -> None:
    """Before torch is loaded, which takes seconds: a mistyped name or a missing comma is answered at once."""
    from dsaccum.config.reading import read_json_object, read_yaml_mapping

    read_json_object(deepspeed)
    if experiment is not None:
        read_yaml_mapping(experiment)
