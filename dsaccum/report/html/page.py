"""From a record to its page: the template of its schema, the figures' words, and the drawings."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dsaccum.records import Record, write_new
from dsaccum.report import conclusion, figures, resources, terminal, watch, weight_views
from dsaccum.report.html import drawings
from dsaccum.verification.diagnosis.causes import UNKNOWN

TEMPLATES = {"dsaccum.verify/1": "verify.html", "dsaccum.watch/1": "watch.html"}
"""By schema. A further record gets a page by a template here that extends ``base.html``."""


def write_html(record: Record, path: str | os.PathLike[str]) -> None:
    """Write the page whole or not at all, never over another file.

    Raises:
        FileExistsError: something stands at ``path``.
        OSError: it cannot be written.
    """
    write_new(Path(path), as_html(record))


def as_html(record: Record) -> str:
    """The page. Whatever a record holds is text in it, never markup."""
    schema = record.schema_name  # type: ignore[attr-defined]  # every record that has a template has one
    return _environment().get_template(TEMPLATES[schema]).render(record=record)


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
    )
    environment.globals.update(
        draw=drawings,
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


_WORDS: dict[str, Any] = {
    "watch": {
        "verdict": watch.verdict_text,
        "described": watch.described,
        "relative_to": watch.relative_to,
        "overall": watch.overall,
        "causes": watch.distinct_causes,
    },
    "verify": {"verdict": conclusion.verdict_text, "described": terminal.described, "equation": terminal.equation},
}
"""The same sentences as on a terminal."""
