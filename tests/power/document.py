"""The matrix in docs/faults.md, as it is made from its record.

After a new run (docs/records/ says how), ``python -m tests.power.document`` writes it anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from dsaccum.power.record import FaultsRecord
from dsaccum.report.fault_matrix import matrix_lines
from dsaccum.report.layout import as_plain_text
from tests.docs.markdown import REPOSITORY

PAGE = REPOSITORY / "docs/faults.md"
RECORDS = REPOSITORY / "docs/records"
_BLOCK = r"(<!-- from records/{name} -->\n).*?(<!-- end -->\n)"
_LIBRARIES = ("deepspeed", "torch", "transformers", "python")


def block(record: FaultsRecord) -> str:
    """What stands between the markers."""
    versions = ", ".join(f"{name} {record.versions[name]}" for name in _LIBRARIES if name in record.versions)
    machine = f"{record.hardware['cores']} cores, {record.hardware['device']}"
    matrix = as_plain_text(matrix_lines(record)).rstrip()
    return f"\n`{' '.join(record.command)}` with {versions} on {machine}:\n\n```text\n{matrix}\n```\n\n"


def written(record: Path) -> str:
    """What stands between the markers now."""
    found = re.search(_pattern(record), PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found, f"{PAGE.name} has no markers for {record.name}"
    return found[0].removeprefix(found[1]).removesuffix(found[2])


def write(record: Path) -> None:
    """Replace it."""
    made = block(FaultsRecord.read(record))
    text = PAGE.read_text(encoding="utf-8")
    text = re.sub(_pattern(record), lambda found: found[1] + made + found[2], text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")


def _pattern(record: Path) -> str:
    return _BLOCK.format(name=re.escape(record.name))


if __name__ == "__main__":
    for path in sorted(RECORDS.glob("faults-*.json")):
        write(path)
