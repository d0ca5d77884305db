"""Naming a failure: which rank, where in the window, and why."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dsaccum.allocator import is_out_of_memory
from dsaccum.config.errors import ConfigError
from dsaccum.engine.process import Ranks
from dsaccum.training.outcome import Interrupted, RunFailed, say
from dsaccum.training.preflight import NotEquivalent
from dsaccum.training.watchdog import Position, Watchdog

_FIX = '; fix: a smaller --micro-batch (E stays), or "train_micro_batch_size_per_gpu": "auto"'
_COMMUNICATION = ("gloo", "nccl", "connection", "process group", "broken pipe")


@contextmanager
def failures_named(ranks: Ranks, watchdog: Watchdog) -> Iterator[None]:
    """Turn what escapes into ``RunFailed`` with this rank, its position and the cause in one line.

    A traceback goes before it where the failure is this rank's own: only the one who wrote the code can mend it.
    """
    try:
        yield
    except (RunFailed, NotEquivalent, Interrupted):
        raise
    except ConfigError as error:
        where = watchdog.position
        if not where.step:
            raise
        raise RunFailed(f"rank {ranks.rank} failed in {where}: {error}", own=True) from error
    except Exception as error:
        where = watchdog.position
        watchdog.publish()
        lost = watchdog.lost_ranks() if is_communication(error) else {}
        if lost:
            first_survivor = min(set(range(ranks.world_size)) - set(lost))
            raise RunFailed(
                f"{_describe_lost(lost)}; the others were in {where}", own=ranks.rank == first_survivor
            ) from error
        say("".join(traceback.format_exception(error)).rstrip())
        reason = " ".join(str(error).split())
        fix = _FIX if is_out_of_memory(error) and where.holds_micro_batch else ""
        failed = f"rank {ranks.rank} failed in {where}: {type(error).__name__}: {reason}{fix}"
        raise RunFailed(failed, own=True) from error


def _describe_lost(lost: dict[int, Position | None]) -> str:
    return "; ".join(
        f"rank {rank} has ended" + (f" (last heard of in {position})" if position is not None else "")
        for rank, position in lost.items()
    )


def is_communication(error: Exception) -> bool:
    """Whether an error tells of another rank rather than of this one: a collective that broke."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _COMMUNICATION)
