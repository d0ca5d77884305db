"""Options that several commands have, in the same words; each command says in which panel of its help they stand."""

from __future__ import annotations

from typing import Any

import typer


def experiment_option(panel: str) -> Any:
    """``--experiment``."""
    return typer.Option(metavar="FILE.yaml", help="Experiment: model, data, loss.", rich_help_panel=panel)


def ranks_option(panel: str) -> Any:
    """``--ranks`` where it may be left out."""
    return typer.Option(metavar="W", help="Data-parallel ranks; as many as cores, at most 2.", rich_help_panel=panel)


def overrides_option(panel: str) -> Any:
    """``--set``."""
    return typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Any field of the YAML; repeatable.", rich_help_panel=panel
    )


def json_option(panel: str | None = None) -> Any:
    """``--json``."""
    return typer.Option("--json", metavar="OUT.json", help="Write the record to a new file.", rich_help_panel=panel)


def html_option(panel: str) -> Any:
    """``--html``."""
    return typer.Option(
        "--html", metavar="OUT.html", help="Write the report as one HTML page, to a new file.", rich_help_panel=panel
    )


def verbose_option(panel: str | None = None) -> Any:
    """``--verbose`` of a command that starts ranks."""
    return typer.Option(
        "--verbose", metavar="", help="What libraries and ranks say, and tracebacks.", rich_help_panel=panel
    )
