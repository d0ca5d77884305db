"""A verification of a continued run, from arguments to a record; the method is that of every verification."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from dsaccum.verification.cases.inputs import likely_ranks
from dsaccum.verification.progress import Progress
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import VerifyRecord
from dsaccum.verification.resumed.arguments import ResumeArguments
from dsaccum.verification.resumed.inputs import read_resumed_case
from dsaccum.verification.verify import examine, record_of, with_fault


def verify_resumed(arguments: ResumeArguments, progress: Progress, pools: RankPools | None = None) -> VerifyRecord:
    """Go on from a copy of a run's checkpoint, and compare its next windows with one big batch each.

    Args:
        arguments: what was asked for.
        progress: told what happens.
        pools: started ranks to use; None for ranks that start and end here.

    Raises:
        ConfigError: the input is wrong.
        RankFailed: a rank could not carry it out.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsaccum-resume-")))
        own = pools if pools is not None else stack.enter_context(RankPools())
        own.get(arguments.ranks or likely_ranks())  # they import their libraries while the run is read
        progress.stage("reading the run, its data and model, and a copy of its checkpoint")
        prepared = with_fault(read_resumed_case(arguments, folder), arguments.fault)
        examined = examine(prepared, own.get(prepared.case.batch.world_size), progress)
    return record_of(prepared, examined, started, arguments.command)
