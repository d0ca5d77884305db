"""deepspeed_loop.py, on whose second rank the watch can't record."""

import os
import runpy
from pathlib import Path

from dsaccum.watch import recording


def broken(*_: object) -> None:
    raise RuntimeError("it broke")


copied = recording.copied
if os.environ.get("RANK") == "1":
    recording.copied = broken
try:
    runpy.run_path(str(Path(__file__).parent / "deepspeed_loop.py"), run_name="__main__")
finally:
    recording.copied = copied
