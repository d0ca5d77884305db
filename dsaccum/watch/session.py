"""One process's watch from its beginning to its record."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dsaccum.config.errors import ConfigError
from dsaccum.report.new_files import check_new_files
from dsaccum.report.watch import print_watch
from dsaccum.training.opening import installed_versions
from dsaccum.verification.records.hardware import hardware
from dsaccum.verification.records.watch import WatchedRecord, WatchRecord, WindowRecord, worst
from dsaccum.watch.attachment import Attachment
from dsaccum.watch.desk import DEFAULT_WINDOW, Desk
from dsaccum.watch.past_outputs import judge
from dsaccum.watch.record import describe_subject, describe_window
from dsaccum.watch.window import WatchedWindow


class Session:
    """Watches this process from now on.

    Args:
        windows: optimizer steps to look at, from 1.
        json: where the record goes when the session ends.
        html: where the report goes then, as one page.
        stop_after: end the script after the last window.
        verbose: tracebacks of the watch's own failures.
        report: gets each finished window as a record of its own; by default it is printed on stderr.
        command: for the record.

    Raises:
        ConfigError: a window is none, or a file that is to be written is there already, or cannot be.
    """

    def __init__(
        self,
        windows: Sequence[int] = (DEFAULT_WINDOW,),
        *,
        json: str | os.PathLike[str] | None = None,
        html: str | os.PathLike[str] | None = None,
        stop_after: bool = False,
        verbose: bool = False,
        report: Callable[[WatchRecord], None] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        if not windows or any(not isinstance(window, int) or window < 1 for window in windows):
            raise ConfigError("is no optimizer step from 1", key="window", value=windows, fix="window=3, or (2, 5)")
        # A script may change its directory.
        self._json, self._html = (Path(path).absolute() if path is not None else None for path in (json, html))
        check_new_files({"json": self._json, "html": self._html})
        self._command, self._began = list(command), time.monotonic()
        self._report = report if report is not None else self._print
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
        try:
            self._attachment.detach()
        except Exception as error:  # whatever it is, it must not change how the script ends
            self.desk.give_up("the watch could not be taken off", error)
        wanted = ", ".join(map(str, self.desk.windows))
        if first:
            for text in unfinished:
                self.desk.miss(f"window {wanted} was not reached: {text}; --window 1 is the earliest")
            if not self._engines and not unfinished and not self.desk.said:
                self.desk.say("nothing to watch: no engine was made, and no optimizer stepped")
            self._write()

    def _write(self) -> None:
        record = self.record
        if self._json is not None:
            self._written("record", self._json, record.write)
        if self._html is not None:
            self._written("report", self._html, lambda path: _write_page(record, path))

    def _written(self, what: str, path: Path, write: Callable[[Path], None]) -> None:
        try:
            write(path)
        except Exception as error:  # whatever it is, it must not change how the script ends
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {' '.join(str(error).split())}"
            self.desk.say(f"the {what} could not be written to {path}: {reason}")

    def _found(self, window: WatchedWindow) -> None:
        broken = [rank for rank in window.ranks if rank.failure]
        if broken:
            first = broken[0]
            self.desk.miss(f"rank {first.rank}: {first.failure}; the script goes on unwatched")
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

    def _print(self, record: WatchRecord) -> None:
        print_watch(record, sys.stderr, several=self.desk.subjects > 1)

    def _record(self, engines: list[WatchedRecord]) -> WatchRecord:
        return WatchRecord(
            verdict=worst([window.verdict for engine in engines for window in engine.windows]),
            engines=engines,
            messages=self.desk.said,
            unproven=self.desk.unproven,
            versions=installed_versions(),
            hardware=hardware(),
            command=self._command,
            elapsed_s=time.monotonic() - self._began,
        )


def _write_page(record: WatchRecord, path: Path) -> None:
    from dsaccum.report.html import write_html  # matplotlib and jinja2 only where a page is asked for

    write_html(record, path)
