"""For test suites: one line that fails unless accumulation gives the update of one big batch.

    from dsaccum.testing import assert_same_update, assert_script_equivalent

    def test_my_config(rank_pool):
        assert_same_update("ds_config.json", experiment="experiment.yaml", pool=rank_pool)

    def test_my_script():
        assert_script_equivalent("train.py", "--epochs", "1", ranks=2)

``rank_pool`` is a pytest fixture that comes with dsaccum: ranks are started once for the whole session. Without it,
each call starts its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsaccum.config.errors import ConfigError
from dsaccum.verification.api import verify
from dsaccum.verification.ranks.failed import RankFailed
from dsaccum.watch.launch import ScriptFailed, watch_script

if TYPE_CHECKING:
    from dsaccum.verification.ranks.pools import RankPools
    from dsaccum.verification.records.record import VerifyRecord
    from dsaccum.verification.records.watch import WatchRecord

__all__ = ["ScriptFailed", "assert_same_update", "assert_script_equivalent", "watch_script"]


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


def assert_script_equivalent(
    script: str | os.PathLike[str],
    *words: str,
    window: int | tuple[int, ...] = 3,
    **keywords: Any,
) -> WatchRecord:
    """Fail unless every window of a script that is watched is right; the message is the verdict with causes and fixes.

    Args:
        script: its path; or ``"-m"``, and the module's name as the first of the words.
        words: its own arguments.
        window: which optimizer steps to look at, from 1.
        keywords: of ``watch_script``: ``ranks``, ``to_the_end``, ``timeout_s``, ``folder``, ``environment``.

    Returns:
        The record, for further assertions.

    Raises:
        AssertionError: a window is wrong or did not come, something that trains was not watched, or nothing is proven.
        ConfigError: there is no such script, or no such number of ranks.
        ScriptFailed: it ended with an error, took too long, or left no record.
    """
    __tracebackhide__ = True
    record = watch_script(script, *words, window=window, **keywords)
    from dsaccum.watch.proven import why_unproven  # pydantic comes with it

    missing = why_unproven(record, {window} if isinstance(window, int) else set(window))
    if record.verdict != "equivalent" or missing:
        from dsaccum.report.watch import failure_text

        raise AssertionError(f"{failure_text(record)}\n{missing or ''}".rstrip())
    return record
