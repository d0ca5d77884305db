"""Links inside the project resolve, down to the heading, and nothing names a machine of ours.

Run: pytest tests/docs/test_links.py. Not covered: links to other sites.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import DOCUMENTS, anchors, links


def by_name(document: Path) -> str:
    return document.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_relative_links_resolve(document: Path) -> None:
    for link in links(document):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has {sorted(anchors(target))}"


def test_every_document_is_linked_from_the_readme() -> None:
    readme = DOCUMENTS[0]
    linked = {(readme.parent / link.partition("#")[0]).resolve() for link in links(readme)}
    assert set(DOCUMENTS[1:]) <= linked


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_no_path_of_a_machine(document: Path) -> None:
    assert not re.findall(r"(?<![\w.])/(?:work|tmp|home|root|Users)\b", document.read_text(encoding="utf-8"))


def test_a_wrong_link_would_be_noticed(tmp_path: Path) -> None:
    """Control: what the parsing is there to find, it finds."""
    page = tmp_path / "page.md"
    page.write_text("# Its `first` part, or so\n[a](b.md#c) and [d](#its-first-part-or-so)\n```text\n[no](link)\n```\n")
    assert links(page) == ["b.md#c", "#its-first-part-or-so"]
    assert anchors(page) == {"its-first-part-or-so"}
