"""No wait without a limit: a thread that ends this rank when it, another rank or the launcher is gone, and names it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil
import torch.distributed as dist

from dsaccum.engine.process import Ranks
from dsaccum.training.notice_board import NoticeBoard
from dsaccum.training.outcome import ExitCode, end_now, say
from dsaccum.training.stop_request import StopRequest

PHASES = ("setup", "data", "exchange", "checkpoint", "forward", "backward", "step", "evaluation", "finish")
"""What a rank can be doing, in the order of a window; a rank that is behind the others is the one that hangs."""
BEAT_S = 1.0
ALONE_S = 60.0
"""How long a rank may take to reach the boundary and save when its launcher is gone."""


@dataclass(frozen=True, order=True)
class Position:
    """Where a rank stands; ordered in time."""

    step: int
    micro_step: int
    phase: int

    @property
    def holds_micro_batch(self) -> bool:
        """Whether a micro-batch passes through the model, so that a smaller one needs less memory."""
        return PHASES[self.phase] in ("forward", "backward", "evaluation")

    def __str__(self) -> str:
        phase = PHASES[self.phase]
        if self.step == 0 or phase == "finish":
            return phase
        if phase == "checkpoint":
            return f"the checkpoint after step {self.step - 1}"
        micro_step = f", micro-step {self.micro_step}" if self.micro_step else ""
        return f"{phase} of step {self.step}{micro_step}"


class Watchdog:
    """Watches this rank's progress, its launcher, and (when asked) the other ranks' heartbeats.

    Args:
        ranks: this rank's place.
        timeout_s: longest time without any progress, in seconds.
        stop: asked when the launcher is gone, so that the run can end in good order.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, stop: StopRequest) -> None:
        self._ranks, self._timeout_s, self._stop_request = ranks, timeout_s, stop
        self.on_end: Callable[[str], None] = lambda _: None
        """Called with the reason, on the way out; whoever keeps the run's record puts it here."""
        self._position, self._moved, self._moves = Position(0, 0, 0), time.monotonic(), 0
        self._launchers = _launchers() if ranks.launched else []
        self._alone_since: float | None = None
        self._beat = 0
        self._board = NoticeBoard(dist.distributed_c10d._get_default_store())
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        """Begin to watch."""
        self.publish()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Leave this rank alone from now on."""
        self._stopped.set()

    def at(self, step: int, micro_step: int, phase: str) -> None:
        """This rank has come so far; a few assignments, cheap enough for every phase of every micro-step."""
        self._position = Position(step, micro_step, PHASES.index(phase))
        self.moved()

    def moved(self) -> None:
        """This rank makes progress where it stands."""
        self._moves += 1
        self._moved = time.monotonic()

    def waits(self) -> None:
        """This rank is through with what it did where it stands; one that is not is behind it."""
        here = self._position
        self._position = replace(here, micro_step=here.micro_step + 1)
        self.moved()

    def moves_of(self, others: Sequence[int], board: NoticeBoard) -> dict[int, str | None]:
        """How often each of these ranks has moved, as of its last heartbeat; of rank -1 where nobody answers.

        Args:
            others: ranks.
            board: of the caller's own thread.
        """
        values = board.read([f"dsaccum/beat/{rank}" for rank in others])
        if values is None:
            return {-1: None}
        return {rank: value and value.split()[-1] for rank, value in zip(others, values, strict=True)}

    @property
    def position(self) -> Position:
        """Where this rank stands."""
        return self._position

    def publish(self) -> None:
        """Let the others know at once where this rank stands, as the last thing it says."""
        self._beat += 1
        self._publish(self._beat)

    def lost_ranks(self) -> dict[int, Position | None]:
        """Ranks that give no sign of life, with where they were last heard of; takes two heartbeats and a half.

        Rank 0 keeps the heartbeats: when they can't be read, it is the one that is gone, and its position unknown.
        """
        before = self._heartbeats()
        if before is not None:
            time.sleep(2.5 * BEAT_S)
        after = self._heartbeats()
        if before is None or after is None:
            return {} if self._ranks.is_first else {0: None}
        return {
            rank: position
            for rank, (beat, position) in after.items()
            if rank != self._ranks.rank and beat == before[rank][0]
        }

    def _watch(self) -> None:
        while not self._stopped.wait(BEAT_S):
            self.publish()
            if any(_is_gone(launcher) for launcher in self._launchers):
                self._go_on_alone()
            if time.monotonic() - self._moved > self._timeout_s:
                self._end(self._describe_hang())

    def _go_on_alone(self) -> None:
        """The launcher is gone (it takes no care of its ranks when a signal ends it): reach the boundary, save, end."""
        now = time.monotonic()
        self._stop_request.ask("the end of its launcher")
        self._alone_since = self._alone_since or now
        if now - self._alone_since > ALONE_S:
            self._end(f"rank {self._ranks.rank}: the launcher is gone since {ALONE_S:.0f} s; ended in {self._position}")

    def _describe_hang(self) -> str:
        waited = f"no progress for {self._timeout_s:g} s (run.timeout_s)"
        beats = self._heartbeats()
        if beats is None:
            return f"{waited}: rank {self._ranks.rank} stands in {self._position}, and rank 0 cannot be reached"
        furthest_behind = min(position for _, position in beats.values())
        behind = sorted(rank for rank, (_, position) in beats.items() if position == furthest_behind)
        if len(behind) == len(beats) and len(beats) > 1:
            return f"{waited}: all ranks stand in {furthest_behind}; which one hangs is not known"
        names = ", ".join(map(str, behind))
        subject = f"rank {names} hangs" if len(behind) == 1 else f"ranks {names} hang"
        return f"{waited}: {subject} in {furthest_behind}"

    def _end(self, reason: str) -> None:
        try:
            say(f"error: {reason}")
            self.on_end(reason)
        finally:
            end_now(ExitCode.FAILED)

    def _publish(self, beat: int) -> None:
        position = self._position
        # Without the board (rank 0 has ended) there is nobody to tell: the next collective fails by itself.
        self._board.write(
            f"dsaccum/beat/{self._ranks.rank}",
            f"{beat} {position.step} {position.micro_step} {position.phase} {self._moves}",
        )

    def _heartbeats(self) -> dict[int, tuple[int, Position]] | None:
        """Each rank's beat and position; None when the board is gone."""
        values = self._board.read([f"dsaccum/beat/{rank}" for rank in range(self._ranks.world_size)])
        if values is None:
            return None
        numbers = [[int(number) for number in (value or "-1 0 0 0 0").split()] for value in values]
        return {rank: (beat, Position(*position)) for rank, (beat, *position, _) in enumerate(numbers)}


def _launchers() -> list[psutil.Process]:
    """The processes above this rank without which nobody waits for it any more.

    ``deepspeed`` starts ``deepspeed.launcher.launch``, which starts the ranks; when the first is ended by SIGTERM, the
    second lives on and leaves the ranks without a master.
    """
    parent = psutil.Process().parent()
    if parent is None:
        return []
    chain = [parent]
    if "deepspeed.launcher.launch" in _command(parent):
        grandparent = parent.parent()
        if grandparent is not None and "deepspeed" in _command(grandparent):
            chain.append(grandparent)
    return chain


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
