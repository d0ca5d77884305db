"""The watch as a callback of transformers' Trainer: ``Trainer(..., callbacks=[WatchCallback()])``.

This module alone imports transformers, which whoever imports it has loaded.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from dsaccum.config.errors import ConfigError
from dsaccum.report.watch import failure_text
from dsaccum.watch import attach
from dsaccum.watch.ranks import gathered
from dsaccum.watch.session import Session


class NotEquivalent(Exception):
    """The watched update was not that of one big batch; the message is the verdict with its causes."""


class WatchCallback(TrainerCallback):
    """Watches one training: from the end of Trainer's ``__init__``, before it makes an engine, to the end of ``train``.

    Args:
        window: which optimizer steps to look at, from 1.
        fail: whether ``train()`` raises ``NotEquivalent`` at its end, on every rank, where the verdict is bad.
        json: where the record goes.
        html: where the report goes, as one page.
        session: of ``dsaccum.watch.session.Session``: ``verbose``, ``report``, ``stop_after``.

    Attributes:
        session: with ``record`` and ``verdict``, on rank 0; None before Trainer was made.
    """

    def __init__(
        self,
        window: int | tuple[int, ...] = 3,
        *,
        fail: bool = False,
        json: str | os.PathLike[str] | None = None,
        html: str | os.PathLike[str] | None = None,
        **session: Any,
    ) -> None:
        self.session: Session | None = None
        self._window, self._fail = window, fail
        self._keywords = {"json": json, "html": html, **session}

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Trainer is made: attach.

        Raises:
            ConfigError: a file that is to be written is there already, or cannot be.
        """
        self.session = attach(self._window, **self._keywords)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """By now the engine is made.

        Raises:
            ConfigError: it came too late to see that.
        """
        if self.session is None:
            raise ConfigError(
                "came to Trainer after it was made",
                source="WatchCallback",
                fix="Trainer(..., callbacks=[WatchCallback()])",
            )

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The training is over.

        Raises:
            NotEquivalent: the verdict is bad, and that was asked to be an error.
        """
        session = self.session
        assert session is not None  # or the training would not have begun
        session.end()
        if self._fail:
            # Only rank 0 knows; were it alone to raise, the others would wait for it in their next collective.
            told = failure_text(session.record) if session.verdict == "not_equivalent" else None
            text = gathered(told, f"{session.desk.session}/end", None)[0]
            if text is not None:
                raise NotEquivalent(text)
