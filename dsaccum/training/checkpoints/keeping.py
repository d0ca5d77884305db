"""When a run saves its state, and what it does when that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from dsaccum.training.checkpoints.manifest import Counters
from dsaccum.training.checkpoints.saving import CheckpointWriter
from dsaccum.training.checkpoints.shelf import Checkpoint
from dsaccum.training.outcome import RunFailed


class CheckpointKeeper:
    """Saves every so many steps, and when asked to.

    Args:
        writer: saves.
        every: optimizer steps between two; 0 for none but those that are asked for.
        on_error: what becomes of the run when one cannot be written.
        note: shows a line.
        at: told that this rank stands before the step of this number, saving.
        start: the checkpoint that the run was continued from.
    """

    def __init__(
        self,
        writer: CheckpointWriter,
        every: int,
        on_error: Literal["continue", "stop"],
        note: Callable[[str], None],
        at: Callable[[int], None],
        start: Checkpoint | None,
    ) -> None:
        self._writer, self._every, self._on_error, self._note, self._at = writer, every, on_error, note, at
        self._last = start.path if start is not None else None
        self._saved_step = start.step if start is not None else None

    def at_boundary(self, counters: Counters) -> None:
        """Save if it is time to. A collective, as all that follow.

        Raises:
            RunFailed: it could not be written, and the run shall stop then.
        """
        if self._every and counters.step and counters.step % self._every == 0:
            problem = self._save(counters)
            if problem is not None and self._on_error == "stop":
                raise RunFailed(f"{problem}; {self._rest} (run.on_checkpoint_error: stop)")
            if problem is not None:
                self._note(f"warning: {problem}; {self._rest}, and the run goes on")

    def save_now(self, counters: Counters) -> None:
        """Save, unless this very step was saved.

        Raises:
            RunFailed: it could not be written.
        """
        if self._saved_step != counters.step:
            problem = self._save(counters)
            if problem is not None:
                raise RunFailed(f"{problem}; {self._rest}")

    def save_at_the_end(self, counters: Counters) -> None:
        """Save what more steps could go on from; the model is still to be exported, so nothing is raised."""
        try:
            self.save_now(counters)
        except RunFailed as error:
            self._note(f"warning: {error}")

    @property
    def _rest(self) -> str:
        return f"the last whole one is {self._last}" if self._last is not None else "there is none before it"

    def _save(self, counters: Counters) -> str | None:
        """What went wrong, the same on all ranks."""
        self._at(counters.step + 1)
        saved = self._writer.save(counters)
        if saved.path is None:
            return f"the checkpoint after step {counters.step} could not be written ({saved.error})"
        self._last, self._saved_step = saved.path, counters.step
        self._note(f"checkpoint      step {counters.step}, {saved.bytes / 1e6:,.1f} MB in {saved.seconds:.2f} s")
        return None
