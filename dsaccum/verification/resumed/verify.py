"""A verification of a continued run, from arguments to a record; the method is that of every verification."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from dsaccum.verification.progress import Progress
from dsaccum.verification.ranks.pools import RankPools
from dsaccum.verification.records.record import VerifyRecord
from dsaccum.verification.resumed.arguments import ResumeArguments
from dsaccum.verification.resumed.inputs import read_resumed_case
from dsaccum.verification.verify import verify_read


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
    progress.stage("reading the run, its data and model, and a copy of its checkpoint")
    with tempfile.TemporaryDirectory(prefix="dsaccum-resume-") as folder:
        return verify_read(arguments, partial(read_resumed_case, arguments, Path(folder)), progress, pools)
