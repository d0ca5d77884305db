"""Ranks that are started once: what they bring back, who is named when one fails, and that nothing of them stays.

Run: ``pytest tests/verification/test_rank_pool.py -n 0`` (two minutes on two idle cores: each failure costs a start).
Not covered: GPUs, and a rank that the kernel will not let die.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from dsaccum.config.errors import ConfigError
from dsaccum.verification.ranks import pool as rank_pool
from dsaccum.verification.ranks.failed import RankFailed
from dsaccum.verification.ranks.pool import RankPool
from tests.verification.pool_tasks import (
    SHORT_S,
    count_aloud,
    doubled,
    exit_like_a_script,
    leave,
    never_give_python_back,
    process_id,
    raise_config_error,
    raise_value_error,
    sleep,
    sleep_further_on,
    start_a_process_and_fail,
    sum_of_ranks,
    wait_for_one_that_is_done,
    work_slowly,
    work_until,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=SHORT_S) as pool:
        yield pool


@pytest.fixture
def workers(pool: RankPool) -> list[psutil.Process]:
    """The processes of two ranks that are there."""
    return [psutil.Process(pid) for pid in pool.run(process_id)]


def test_results_come_by_rank_after_a_real_collective(pool: RankPool) -> None:
    assert pool.run(sum_of_ranks, 2.0) == [(0, 6.0), (1, 6.0)]


def test_tasks_share_the_processes(pool: RankPool) -> None:
    ids = pool.run(process_id)
    assert pool.run(process_id) == ids
    assert len({*ids, os.getpid()}) == 3


def test_messages_arrive_in_order_and_before_the_results(pool: RankPool) -> None:
    heard: list[tuple[int, tuple[int, int]]] = []
    pool.run(count_aloud, 500, on_message=lambda rank, message: heard.append((rank, message)))
    assert len(heard) == 1000
    for rank in range(2):
        assert [message for who, message in heard if who == rank] == [(rank, number) for number in range(500)]


def test_large_tensors_come_back_as_they_are(pool: RankPool) -> None:
    tensors = {"large": torch.arange(10_000_000, dtype=torch.float32), "small": torch.ones(3, dtype=torch.bfloat16)}
    for result in pool.run(doubled, tensors):
        assert torch.equal(result["large"], 2 * tensors["large"])
        assert torch.equal(result["small"], 2 * tensors["small"])


def test_a_task_of_the_main_script_is_refused(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_id, "__module__", "__main__")
    with pytest.raises(ValueError, match="process_id must stand in a module that the ranks can import"):
        pool.run(process_id)


@pytest.mark.slow
def test_worn_ranks_are_replaced_before_the_next_task(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool(1) as pool:
        first = pool.run(process_id)
        monkeypatch.setattr(rank_pool, "MOST_TASKS", 1)
        second = pool.run(process_id)
        assert second != first
        monkeypatch.undo()
        assert pool.run(process_id) == second
        monkeypatch.setattr(rank_pool, "MOST_GROWTH_BYTES", -(2**40))
        assert pool.run(process_id) != second


# Failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "line", "details"),
    [
        (raise_value_error, "rank 1 failed {}: ValueError: no such expert", ["in raise_value_error"]),
        pytest.param(
            exit_like_a_script, "rank 1 failed {}: SystemExit: 1", ["in exit_like_a_script"], marks=pytest.mark.slow
        ),
        pytest.param(
            leave, "rank 1 ended (exit code 7) {}; its last words: rank 1 goes on", [], marks=pytest.mark.slow
        ),
        (sleep, "rank 1 hangs {0}: no rank moved for 3 s; rank 0 waits {0}", ["in sleep", "in all_reduce"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_rank_that_fails_is_named_while_the_other_waits(
    pool: RankPool, workers: list[psutil.Process], end: Callable[[], None], line: str, details: list[str]
) -> None:
    started = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        pool.run(work_until, end)
    assert str(failed.value) == line.format("at step 2, micro-step 3, forward")
    assert (failed.value.rank, failed.value.place) == (1, "step 2, micro-step 3, forward")
    assert all(detail in failed.value.details for detail in ["rank 1 goes on", *details])
    assert time.monotonic() - started < SHORT_S + 5
    assert not any(worker.is_running() for worker in workers)
    assert pool.run(sum_of_ranks, 1.0) == [(0, 3.0), (1, 3.0)]


def test_a_mistake_of_the_user_comes_through_as_it_is(pool: RankPool) -> None:
    with pytest.raises(ConfigError, match=r"a.yaml: run.seed = .*: is no number; fix: write 1") as refused:
        pool.run(work_until, raise_config_error)
    assert (refused.value.key, refused.value.fix) == ("run.seed", "write 1")


def test_a_rank_that_waits_is_not_blamed_though_it_is_behind(pool: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 hangs at step 1, micro-step 1, backward.*; rank 0 waits at"):
        pool.run(sleep_further_on)


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_is_done_is_named(pool: RankPool) -> None:
    with pytest.raises(RankFailed, match=r"^rank 0 hangs at step 1.*; rank 1 is done$"):
        pool.run(wait_for_one_that_is_done)


def test_waiting_for_a_rank_that_moves_is_no_hang(pool: RankPool) -> None:
    pool.run(work_slowly)


def test_a_rank_that_died_idle_is_replaced(pool: RankPool, workers: list[psutil.Process]) -> None:
    workers[1].kill()
    workers[1].wait(5)
    assert pool.run(sum_of_ranks, 1.0) == [(0, 3.0), (1, 3.0)]


def test_a_rank_killed_from_outside_is_named(pool: RankPool, workers: list[psutil.Process]) -> None:
    timer = threading.Timer(1.0, workers[0].kill)
    timer.start()
    with pytest.raises(RankFailed, match=r"; its last words: rank 0 goes on$") as failed:
        pool.run(work_until, sleep)
    assert str(failed.value).startswith("rank 0 was killed (signal 9) at step 2, micro-step 3, forward")
    timer.join()


def test_ranks_end_when_their_listener_raises() -> None:
    def refuse(rank: int, message: object) -> None:
        raise KeyboardInterrupt

    with RankPool(1) as pool:
        (worker,) = pool.run(process_id)
        with pytest.raises(KeyboardInterrupt):
            pool.run(count_aloud, 5, on_message=refuse)
        assert _gone(worker)


def test_what_a_rank_started_ends_with_it(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankFailed):
        pool.run(start_a_process_and_fail, tmp_path / "pid")
    for rank in range(2):
        assert _gone(int((tmp_path / f"pid.{rank}").read_text()))


# Start and end -------------------------------------------------------------------------------------------------------


def test_a_rank_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed.py").write_text("print('a broken install')\nraise ImportError('no deepspeed here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with RankPool(1) as pool, pytest.raises(RankFailed) as failed:
        pool.run(process_id)
    assert str(failed.value) == "rank 0 failed while importing its libraries: ImportError: no deepspeed here"
    assert "a broken install" in failed.value.details


def test_a_rank_that_hangs_at_its_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        RankPool(1, start_timeout_s=SHORT_S) as pool,
        pytest.raises(RankFailed, match=r"^rank 0 hangs while importing its libraries: no rank moved for 3 s$"),
    ):
        pool.run(process_id)


def test_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither files, nor shared memory, nor open files, nor processes: after success, failure, and a start unused."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_files = psutil.Process().num_fds()
    with RankPool(2) as pool:
        pids = pool.run(process_id)
        pool.run(doubled, {"large": torch.ones(1_000_000)})
        idle = psutil.Process().num_fds()
        pool.run(doubled, {"large": torch.ones(1_000_000)})
        assert psutil.Process().num_fds() == idle
        with pytest.raises(RankFailed):
            pool.run(work_until, raise_value_error)
        assert psutil.Process().num_fds() == open_files
        pool.start()
        pool.close()
        pool.close()
        assert psutil.Process().num_fds() == open_files
    # torch makes an empty folder when it is imported, always by the same name.
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []
    assert all(_gone(pid) for pid in pids)
    segments = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    assert not [name for name in segments for pid in [os.getpid(), *pids] if f"_{pid}_" in name]


SCRIPT = """
import os, sys, threading
sys.path.insert(0, {repository!r})
from dsaccum.verification.ranks.pool import RankPool
from tests.verification.pool_tasks import never_give_python_back, process_id, sleep, work_until
assert __name__ == "__main__"
print("once", flush=True)
pool = RankPool({world_size})
"""
KILLED_WHILE_RANKS_WORK = """
def work():
    print(*pool.run(process_id), flush=True)
    pool.run(work_until, {end})
"""


def test_ranks_start_where_stdin_is_closed(repository: Path, tmp_path: Path) -> None:
    """As under some daemons: number 0 is free, and a file of ours that got it would be lost in the rank."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(repository=str(repository), world_size=1) + "print(len(pool.run(process_id)))\n")
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" "{script}" <&-'], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "once\n1\n"), done.stderr


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_once(repository: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(repository=str(repository), world_size=1) + "print(len(pool.run(process_id)))\n")
    for command in ([str(script)], ["-"]):
        done = subprocess.run(
            [sys.executable, *command], input=script.read_text(), capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, "once\n1\n"), done.stderr


@pytest.mark.parametrize(
    ("number", "call", "end"),
    [
        pytest.param(signal.SIGINT, "work()", sleep, id="ctrl-c", marks=pytest.mark.slow),
        pytest.param(
            signal.SIGKILL,
            "threading.Thread(target=work).start()",
            sleep,
            id="killed, started in a thread",
            marks=pytest.mark.slow,
        ),
        pytest.param(signal.SIGKILL, "work()", never_give_python_back, id="killed, lock held"),
    ],
)
def test_ranks_end_with_their_owner(
    repository: Path, tmp_path: Path, number: int, call: str, end: Callable[[], None]
) -> None:
    """One rank has something else to do, the other waits for it in a collective."""
    script = tmp_path / "script.py"
    work = KILLED_WHILE_RANKS_WORK.format(end=end.__name__)
    script.write_text(SCRIPT.format(repository=str(repository), world_size=2) + work + call + "\n")
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    owner.stdout.readline()
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    time.sleep(1)
    assert len(pids) == 2
    assert not any(map(_gone, pids))
    assert not any(os.getpgid(pid) == os.getpgid(owner.pid) for pid in pids), "a terminal's Ctrl-C would reach them"
    owner.send_signal(number)
    assert owner.wait(10) == -number
    limit = time.monotonic() + 5
    while not all(map(_gone, pids)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert all(map(_gone, pids))
    owner.communicate()


def _gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
