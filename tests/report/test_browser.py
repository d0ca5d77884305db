"""Pages in a real headless Chromium, as on a phone and on a desk: nothing complains and nothing overflows.

Run: pytest tests/report/test_browser.py -m slow -n 0. Not covered: whether it looks good, which a person has to see.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsaccum.report.html import as_html, as_one_page
from tests.report import kinds, records, watch_records
from tests.report.browser import CHROMIUM, Browser, browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]
PHONE, DESK = 390, 1280
LONG = "a_name_without_a_single_place_to_break_it" * 5
PAGES: dict[str, Callable[[], str]] = {
    "verify passing": lambda: as_html(records.record()),
    "verify failing": lambda: as_html(records.loss_scaled_twice()),
    "verify by rank": lambda: as_html(records.ranks_not_reduced()),
    "verify with 64 micro-steps on 8 ranks": lambda: as_html(records.record(accumulation_steps=64, ranks=8)),
    "verify with long names": lambda: as_html(records.record(loop=LONG, warnings=[LONG], command=[LONG])),
    "watch": lambda: as_html(watch_records.two_engines()),
    "faults": lambda: as_html(kinds.faults(sound=False)),
    "audit": lambda: as_html(kinds.audit(good=False)),
    "audit with one's own": lambda: as_html(kinds.own_audit()),
    "bench": lambda: as_html(kinds.bench()),
    "run": lambda: as_html(kinds.train()),
    "run with long names": lambda: as_html(kinds.train("failed", reason=LONG, name=LONG)),
    "plan": lambda: as_html(kinds.plan()),
    "plan that does not fit": lambda: as_html(kinds.plan(memory=2**33, other_memory=2**34)),
    "plan with long names": lambda: as_html(kinds.plan(experiment=LONG, written=LONG, advice=[LONG])),
    "other": lambda: as_html(kinds.other()),
    "many": lambda: as_one_page({LONG: records.loss_scaled_twice(), "b": kinds.train(), "c": kinds.faults(sound=True)}),
}
OVERFLOW = "document.documentElement.scrollWidth > window.innerWidth || window.innerWidth > %d"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.mark.parametrize("name", PAGES)
def test_nothing_complains_and_nothing_overflows(name: str, chromium: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES[name]())
    for width in (PHONE, DESK):
        for dark in (False, True):
            chromium.open(page, width, dark=dark)
            assert not chromium.evaluate(OVERFLOW % width)
            chromium.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert not chromium.evaluate(OVERFLOW % width), "with everything open"
            assert chromium.complaints() == []
            assert picture_size(chromium.picture()) == (width, 800)
    assert chromium.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("name", ["bench", "plan"])
def test_words_of_drawings_are_large_enough_on_a_phone(name: str, chromium: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES[name]())
    chromium.open(page, PHONE)
    heights = "Math.min(...[...document.querySelectorAll('svg text')].map(each => each.getBoundingClientRect().height))"
    assert chromium.evaluate(heights) >= 9


def test_dark_and_light_are_not_the_same(chromium: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES["verify failing"]())
    colours = []
    for dark in (False, True):
        chromium.open(page, DESK, dark=dark)
        colours.append(chromium.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] == "rgb(255, 255, 255)"
    assert colours[1] != colours[0]


@pytest.mark.parametrize(
    "planted",
    [
        "<div style='width: 3000px'>wide</div>",
        "<img src='https://example.org/picture.png'>",
        "<script>console.error('from a script')</script>",
    ],
)
def test_what_is_wrong_with_a_page_would_be_noticed(planted: str, chromium: Browser, tmp_path: Path) -> None:
    """Control."""
    page = tmp_path / "page.html"
    page.write_text(PAGES["other"]().replace("</main>", f"{planted}</main>"))
    chromium.open(page, PHONE)
    assert chromium.evaluate(OVERFLOW % PHONE) or chromium.complaints()


def picture_size(png: bytes) -> tuple[int, int]:
    width, height = struct.unpack(">II", png[16:24])
    return width, height
