"""A file that a config names is executed once, and again when it has changed or is forgotten.

Run: pytest tests/config/test_factories.py. Not covered: what is said of a file that cannot be used (tests/configs).
"""

from __future__ import annotations

from pathlib import Path

from dsaccum.config.factories import forget_factories, load_factory

COUNTS = "calls = []\n\ndef count():\n    calls.append(1)\n    return len(calls)\n"


def counted(path: Path) -> int:
    return load_factory(f"{path}:count", key="model.factory")()


def test_a_file_is_executed_once_until_it_changes_or_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "counts.py"
    path.write_text(COUNTS)
    assert [counted(path), counted(path)] == [1, 2]
    path.write_text(COUNTS + "# changed\n")
    assert [counted(path), counted(path)] == [1, 2]
    forget_factories()
    assert counted(path) == 1


def test_files_of_one_name_are_not_mistaken(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "counts.py").write_text(COUNTS)
    assert [counted(tmp_path / folder / "counts.py") for folder in ("a", "b", "a")] == [1, 1, 1]
