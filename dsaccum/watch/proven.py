"""Why a run is not proven right though nothing is wrong: a check that looked at nothing must not pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dsaccum.verification.records.watch import WatchRecord, WindowRecord


def why_unproven(record: WatchRecord, asked: Collection[int]) -> str | None:
    """In one line; None where every window that was asked for is right, or one is wrong.

    Args:
        record: of the whole run.
        asked: windows that were to be looked at.
    """
    windows = [window for engine in record.engines for window in engine.windows]
    if record.verdict == "not_equivalent":
        return None
    if not windows:
        return "no window was judged"
    if record.verdict is None:
        return "the verdict is NONE" + _not_tested(windows)
    if not all(set(asked) <= {each.window for each in engine.windows} for engine in record.engines):
        return "not all windows that were asked for came"
    return "not all that trains was watched" if record.unproven else None


def _not_tested(windows: Sequence[WindowRecord]) -> str:
    """The claims that a verdict rests on, and why they could not be told."""
    told = {
        name: window.reasons.get(name)
        for window in windows
        for name in window.claims.which("untested")
        if name in ("weighting", "gradient")
    }
    return "".join(
        f"; {name} not tested: {reason}" if reason else f"; {name} not tested" for name, reason in told.items()
    )
