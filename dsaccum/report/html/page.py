"""From records to a page: the template of each one's schema, the figures' words, and the drawings."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dsaccum.records import Record, write_new
from dsaccum.report import (
    audit_matrix,
    fault_matrix,
    figures,
    plan,
    resources,
    terminal,
    train_run,
    watch,
    weight_views,
)
from dsaccum.report.html import conclusions, drawings, plan_drawings, run_drawings
from dsaccum.verification.diagnosis.causes import UNKNOWN

TEMPLATES = {
    "dsaccum.verify/1": "verify.html",
    "dsaccum.watch/1": "watch.html",
    "dsaccum.faults/1": "faults.html",
    "dsaccum.audit/1": "audit.html",
    "dsaccum.bench/1": "bench.html",
    "dsaccum.train/1": "train.html",
    "dsaccum.plan/1": "plan.html",
    "dsaccum.doctor/1": "record.html",
}
"""By schema. A further record gets a page by a row here, a template with a macro ``body(record, anchor)``, and what it
comes down to in ``conclusions``."""


@dataclass(frozen=True)
class Section:
    """One record on a page; ``anchor`` begins the id of everything in it that has one."""

    name: str
    anchor: str
    record: Record
    conclusion: conclusions.Conclusion
    body: Markup


def write_html(record: Record, path: str | os.PathLike[str]) -> None:
    """Write the page whole or not at all, never over another file.

    Raises:
        FileExistsError: something stands at ``path``.
        OSError: it cannot be written.
    """
    write_new(Path(path), as_html(record))


def as_html(record: Record) -> str:
    """The page of one record. Whatever a record holds is text in it, never markup."""
    return as_one_page({"": record})


def as_one_page(records: Mapping[str, Record]) -> str:
    """Several records on one page, one by itself as ``as_html`` has it.

    Args:
        records: by the name that tells each from the others.
    """
    environment = _environment()
    sections = [
        _section(environment, name, f"record-{number}", record)
        for number, (name, record) in enumerate(records.items(), start=1)
    ]
    return environment.get_template("page.html").render(sections=sections)


def _section(environment: Environment, name: str, anchor: str, record: Record) -> Section:
    schema = record.schema_name  # type: ignore[attr-defined]  # every record that has a template has one
    template: Any = environment.get_template(TEMPLATES[schema]).module
    concluded = conclusions.BY_SCHEMA[schema](record)
    return Section(name, anchor, record, concluded, Markup(template.body(record, anchor)))


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dsaccum.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        scientific=figures.scientific,
        ratio=figures.ratio,
        plain=figures.plain,
        size=figures.size,
        signed_size=_signed_size,
        counted=figures.counted,
        demoted=_demoted,
    )
    environment.globals.update(
        draw=drawings,
        draw_run=run_drawings,
        draw_plan=plan_drawings,
        exceeds=figures.exceeds,
        words=_WORDS,
        content_of=resources.content_of,
        weight_views=weight_views.weight_views,
        is_odd=weight_views.is_odd,
        weight_text=weight_views.weight_text,
        decimals_for=weight_views.decimals_for,
        UNKNOWN=UNKNOWN,
    )
    return environment


def _signed_size(amount: int) -> str:
    return figures.size(amount) if amount >= 0 else f"-{figures.size(-amount)}"


def _demoted(markup: Markup) -> Markup:
    """Its headings one level down: below that of a page of many records. Text of a record has no ``<`` in it."""
    return Markup(re.sub(r"(</?h)([1-5])\b", lambda tag: f"{tag[1]}{int(tag[2]) + 1}", markup))


_WORDS: dict[str, Any] = {
    "watch": {"verdict": watch.verdict_text, "described": watch.described, "relative_to": watch.relative_to},
    "verify": {"described": terminal.described, "equation": terminal.equation},
    "faults": fault_matrix,
    "audit": audit_matrix,
    "train": train_run,
    "plan": plan,
}
"""The same sentences as on a terminal."""
