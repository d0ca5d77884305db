"""Before a long run: a few windows of it, verified on its own ranks, once for each config, model and installed code."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsaccum.engine.process import Ranks
    from dsaccum.training.inputs import Inputs
    from dsaccum.training.watchdog import Watchdog


def preflight(inputs: Inputs, ranks: Ranks, watchdog: Watchdog, note: Callable[[str], None]) -> dict[str, Any]:
    """Verify a shrunk copy of the run, on the processes that will train, unless that has been done before.

    Every rank calls it once, after the process group has started and before the run's own engine is built. It leaves
    the state of random generators, and whatever an engine changes for the whole process, as it was.

    Arguments, result and errors: ``dsaccum.training.preflight.Preflight``.
    """
    started = time.perf_counter()
    from dsaccum.preflight.check import carry_out  # the verification comes with it: not for --help

    record = carry_out(inputs, ranks, watchdog, note)
    return {**record, "seconds": round(time.perf_counter() - started, 3)}
