"""One process's watch from its beginning to its record."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dsaccum.report.watch import print_watch
from dsaccum.training.opening import installed_versions
from dsaccum.verification.records.watch import WatchedRecord, WatchRecord, WindowRecord, worst
from dsaccum.watch.attach import Attachment
from dsaccum.watch.desk import DEFAULT_WINDOW, Desk
from dsaccum.watch.judge import judge
from dsaccum.watch.record import describe_subject, describe_window
from dsaccum.watch.window import WatchedWindow


class Session:
    """Watches this process from now on.

    Args:
        windows: optimizer steps to look at, from 1.
        json: where the record goes when the session ends.
        stop_after: end the script after the last window.
        verbose: tracebacks of the watch's own failures.
        report: gets each finished window as a record of its own; by default it is printed on stderr.
        command: for the record.
    """

    def __init__(
        self,
        windows: Sequence[int] = (DEFAULT_WINDOW,),
        *,
        json: str | os.PathLike[str] | None = None,
        stop_after: bool = False,
        verbose: bool = False,
        report: Callable[[WatchRecord], None] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self._json, self._command, self._began = json, list(command), time.monotonic()
        self._report = report if report is not None else lambda record: print_watch(record, sys.stderr)
        self._engines: dict[int, WatchedRecord] = {}
        self.desk = Desk(tuple(sorted(windows)), self._found, stop_after=stop_after, verbose=verbose)
        self._attachment = Attachment(self.desk)
        self._ended = False

    @property
    def record(self) -> WatchRecord:
        """All windows so far."""
        engines = [self._engines[number] for number in sorted(self._engines)]
        return self._record(engines)

    @property
    def verdict(self) -> str | None:
        """``equivalent``, ``not_equivalent``, or None where nothing was proven; on rank 0 alone."""
        return self.record.verdict

    def end(self) -> None:
        """Take everything off the process, say what was not seen, and write the record."""
        if self._ended:
            return
        self._ended = True
        first = int(os.environ.get("RANK", 0)) == 0
        unfinished = self._attachment.unfinished
        self._attachment.detach()
        wanted = ", ".join(map(str, self.desk.windows))
        if first:
            for text in unfinished:
                self.desk.say(f"window {wanted} was not reached: {text}; --window 1 is the earliest")
            if not self._engines and not unfinished and not self.desk.said:
                self.desk.say("nothing to watch: no engine was made, and no optimizer stepped")
            if self._json is not None:
                self._write(Path(self._json))

    def _write(self, path: Path) -> None:
        try:
            self.record.write(path)
        except OSError as error:
            self.desk.say(f"the record could not be written to {path}: {error.strerror or error}")

    def _found(self, window: WatchedWindow) -> None:
        broken = [rank for rank in window.ranks if rank.failure]
        if broken:
            first = broken[0]
            self.desk.say(f"rank {first.rank}: {first.failure}; the script goes on unwatched")
            return
        try:
            judged = judge(window)
            described: WindowRecord = describe_window(judged)
            number = judged.facts.engine
            before = self._engines[number].windows if number in self._engines else []
            engine = describe_subject(judged, [*before, described])
            self._engines[number] = engine
            shown = engine.model_copy(update={"windows": [described]})
            self._report(self._record([shown]))
        except Exception as error:
            self.desk.give_up("the window could not be judged", error)

    def _record(self, engines: list[WatchedRecord]) -> WatchRecord:
        return WatchRecord(
            verdict=worst([window.verdict for engine in engines for window in engine.windows]),
            engines=engines,
            messages=self.desk.said,
            versions=installed_versions(),
            command=self._command,
            elapsed_s=time.monotonic() - self._began,
        )
