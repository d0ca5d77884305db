"""For test suites: one line that fails unless accumulation gives the update of one big batch.

    from dsaccum.testing import assert_same_update

    def test_my_config(rank_pool):
        assert_same_update("ds_config.json", experiment="experiment.yaml", pool=rank_pool)

``rank_pool`` is a pytest fixture that comes with dsaccum: ranks are started once for the whole session. Without it,
each call starts its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsaccum.config.errors import ConfigError
from dsaccum.verification.api import verify
from dsaccum.verification.ranks.failed import RankFailed

if TYPE_CHECKING:
    from dsaccum.verification.ranks.pools import RankPools
    from dsaccum.verification.records.record import VerifyRecord

__all__ = ["assert_same_update"]


def assert_same_update(
    deepspeed: str | Path,
    *,
    experiment: str | Path | None = None,
    ranks: int | None = None,
    steps: int = 3,
    accumulation_steps: int | None = None,
    micro_batch: int | None = None,
    loop: str = "dsaccum",
    fault: str | None = None,
    remedies: bool = True,
    strict: bool = False,
    full_size: bool = False,
    overrides: Sequence[str] = (),
    verbose: bool = False,
    pool: RankPools | None = None,
) -> VerifyRecord:
    """Fail unless the verdict is ``equivalent``; the message is the verdict with its causes and fixes.

    Args are those of ``dsaccum.verify``, and:

    Args:
        strict: whether it also fails where something that this machine cannot run was substituted, or a claim was left
            untested.
        pool: started ranks, as the fixture ``rank_pool`` has them.

    Returns:
        The record, for further assertions.

    Raises:
        AssertionError: not equivalent, or nothing is proven because gradient or update could not be tested.
        ConfigError: the input is wrong.
        RankFailed: it could not be carried out.
    """
    __tracebackhide__ = True  # pytest then points at the caller's line
    try:
        record = verify(
            deepspeed,
            experiment=experiment,
            ranks=ranks,
            steps=steps,
            accumulation_steps=accumulation_steps,
            micro_batch=micro_batch,
            loop=loop,
            fault=fault,
            remedies=remedies,
            full_size=full_size,
            overrides=overrides,
            verbose=verbose,
            pools=pool,
        )
    except (ConfigError, RankFailed) as error:
        if verbose:
            raise
        raise error.with_traceback(None) from None  # its line says all, and our frames would hide it
    from dsaccum.report.terminal import failure_text

    if record.verdict != "equivalent":
        raise AssertionError(failure_text(record))
    if strict and (open_questions := record.open_questions()):
        raise AssertionError("strict: " + "\n".join(open_questions))
    return record
