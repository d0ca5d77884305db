"""The paper that figures are drawn on: inline SVG in the page's own colours, so that one drawing serves light, dark and
print. Figures hold numbers and words of ours, and no text from a record but names of tensors, which matplotlib escapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from itertools import count
from typing import Any

from markupsafe import Markup

INK, FAINT, RIGHT, WRONG = "#010101", "#020202", "#030303", "#040404"
SERIES = ("#050505", "#060606", "#070707", "#080808", "#090909", "#0a0a0a", "#0b0b0b")
"""Stand-ins that matplotlib accepts; the page's variables take their places."""
VARIABLES = {
    INK: "ink", FAINT: "faint", RIGHT: "right", WRONG: "wrong",
    **{stand_in: f"series-{number}" for number, stand_in in enumerate(SERIES, start=1)},
}  # fmt: skip
_WIDTH = 4.4
"""Inches. On a phone it shrinks by a fifth, and its words have to be legible still."""
_numbers = count()  # of drawings: no two of a page share an id


@contextmanager
def figure(height: float) -> Iterator[tuple[Any, Callable[[str], Markup]]]:
    """Axes to draw on, and what gives the SVG afterwards. A script's own settings and figures are not touched."""
    import matplotlib  # only a page with figures pays for it
    from matplotlib.figure import Figure

    drawn = StringIO()

    def svg(title: str) -> Markup:
        return _inline(drawn.getvalue(), title)

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_LOOK, "svg.hashsalt": str(next(_numbers))})
        paper = Figure(figsize=(_WIDTH, height), layout="constrained")  # not pyplot's: it belongs to nobody else
        axes = paper.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        yield axes, svg
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        paper.savefig(drawn, format="svg", transparent=True, metadata=nothing)


_LOOK: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 9.0,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": FAINT, "xtick.color": FAINT, "ytick.color": FAINT,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK,
}  # fmt: skip


def _inline(drawn: str, title: str) -> Markup:
    """As a part of a page, which has its own font and styles."""
    svg = drawn[drawn.index("<svg") :]
    svg = re.sub(r'<g id="[^"]*"| xmlns(:xlink)?="[^"]*"', lambda found: "<g" if found[0][0] == "<" else "", svg)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)  # it would hold for the whole page
    svg = re.sub(r"font-family: [^;\"]*|(?<=px )'DejaVu Sans'[^;\"]*", "", svg)
    for stand_in, name in VARIABLES.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1))
