"""A run that is ended again and again, in every way, and goes on in another split each time: still the same run.

Run: SOAK_MINUTES=15 pytest -n 0 -s -m slow tests/endurance/test_soak.py (SOAK_SEED=... repeats one). Some samples make
the loss NaN, so that DeepSpeed discards their windows. Expected: the run that was never ended, in one split, to the
bound of test_resplit.py (unbroken runs in the splits 1 x 4 x 4 and 1 x 16 x 1 stay within 1e-7 of each other for 370
steps). Memory: the peak of a start does not depend on how many came before it, nor on the steps of one that goes on.
Files: at the end those of the unbroken run. Control: a stream that is entered one sample too late is beyond the bound.
Not covered: damage (test_faults.py), power failures, GPUs.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from dsaccum.training.checkpoints.manifest import Manifest
from tests.endurance.running import drafts, kill, metrics, move_in_stream, started, steps_in, trainers, wait_until
from tests.endurance.test_resplit import BOUND

MINUTES = float(os.environ.get("SOAK_MINUTES", "15"))
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(int(MINUTES * 240 + 1800))]
EVERY, KEEP, GROWTH = 5, 2, 1.05
LOSS = Path(__file__).with_name("poisoned.py")
ENDLESS = ["--steps", "1000000", "--set", f"run.checkpoint_every={EVERY}", "--set", f"run.keep_checkpoints={KEEP}",
           "--set", f"loss.factory={LOSS}:loss"]  # fmt: skip
SPLITS = [(1, 4, 4), (1, 2, 8), (1, 8, 2), (2, 2, 4), (2, 4, 2)]
"""(W, N, B)."""
SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]
START_S = 300.0
"""The longest that a start may take on a busy machine."""


@pytest.mark.parametrize("stage", [0, 1])
def test_soak(tmp_path: Path, stage: int) -> None:
    seed = int(os.environ.get("SOAK_SEED", time.time_ns() % 10**6))
    print(f"\nSOAK_SEED={seed}, ZeRO {stage}, {MINUTES / 2:g} minutes")
    soaked, expected = tmp_path / "soaked", tmp_path / "expected"
    peaks = _soak(soaked, stage, random.Random(seed))
    steps = steps_in(soaked)
    memory = _run_unbroken(expected, stage, steps)
    discarded = sum(not line["applied"] for line in metrics(soaked))
    furthest = _furthest(expected, soaked)
    print(f"{steps} steps, {discarded} of them discarded; furthest {furthest:.1e}; peaks in MB {dict(peaks)}")
    assert discarded > 0 or steps < 100, "no sample was poisoned"
    assert furthest < BOUND
    assert _told(expected, steps) == _told(soaked, steps)
    for world_size, sizes in peaks.items():
        assert _grown(sizes) < GROWTH, f"memory of starts with {world_size} ranks"
    assert _grown(memory[len(memory) // 4 :]) < GROWTH, "memory of the run that was not ended"
    assert _names(soaked) == _names(expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "expected.log", "soaked", "soaked.log"]
    late = _furthest(expected, _entered_late(expected, stage))
    print(f"control: {late:.1e}")
    assert late > 10 * BOUND, "control: a few windows, one sample of 16 another"


def _soak(run: Path, stage: int, choose: random.Random) -> dict[int, list[int]]:
    """Ends it at random until the time is over, the last time in good order; peaks of memory by number of ranks."""
    peaks = defaultdict(list)
    until = time.monotonic() + MINUTES * 60 / 2
    number = 0
    while time.monotonic() < until:
        number += 1
        split, way = choose.choice(SPLITS), choose.choice(["kill", "draft", "signal"])
        world_size, peak = split[0], _start_and_end(run, stage, split, way, choose)
        peaks[world_size].append(peak)
        print(f"start {number}: {split}, {way}: {steps_in(run)} lines, {peak} MB, {_checkpoints(run)}", flush=True)
        assert len(_checkpoints(run)) <= KEEP + 2, "one more, and a draft, where it was killed in between"
    _start_and_end(run, stage, SPLITS[0], "signal", choose)
    return peaks


def _start_and_end(run: Path, stage: int, split: tuple[int, int, int], way: str, choose: random.Random) -> int:
    """Its peak of memory in MB."""
    with started(run, *ENDLESS, *_flags(split), ranks=_ranks(split), stage=stage) as process:
        goal, left = steps_in(run) + choose.randint(1, 2 * EVERY), drafts(run)
        _assert_reached(run, process, goal)
        if way == "draft":
            assert wait_until(lambda: bool(drafts(run) - left), process, START_S), _log(run)
            time.sleep(choose.random() * 0.05)
        peak = max(map(_peak, trainers(process)))
        if way == "signal":
            _signal(run, process, choose.choice(SIGNALS), choose)
        else:
            kill(process)
    return peak


def _run_unbroken(run: Path, stage: int, steps: int) -> list[int]:
    """So many steps or a few more, in one go; its memory in MB over the time."""
    with started(run, *ENDLESS, *_flags(SPLITS[0]), stage=stage) as process:
        _assert_reached(run, process, 1)
        memory = []
        while steps_in(run) < steps:
            assert process.poll() is None, _log(run)
            memory.append(psutil.Process(process.pid).memory_info().rss >> 20)
            time.sleep(0.1)
        _signal(run, process, signal.SIGTERM, random.Random())
    return memory


def _entered_late(run: Path, stage: int) -> Path:
    """A copy that goes on from the older of its checkpoints to where it ends, with another sample in each window."""
    late = run.with_name("late")
    shutil.copytree(run, late)
    newest = _checkpoints(late)[-1]
    shutil.rmtree(late / "checkpoints" / newest)
    checkpoint = late / "checkpoints" / _checkpoints(late)[-1]
    move_in_stream(checkpoint, window=0, position=1)
    steps, before = steps_in(run), Manifest.read(checkpoint).counters.step
    with started(late, *ENDLESS, *_flags(SPLITS[0]), stage=stage) as process:
        wait_until(lambda: steps_in(late) <= before, process, START_S)
        _assert_reached(late, process, steps)
    return late


def _assert_reached(run: Path, process: subprocess.Popen[str], steps: int) -> None:
    assert wait_until(lambda: steps_in(run) >= steps, process, START_S), _log(run)


def _signal(run: Path, process: subprocess.Popen[str], number: signal.Signals, choose: random.Random) -> None:
    os.kill(choose.choice(trainers(process)).pid, number)
    assert process.wait(timeout=START_S) == 75, _log(run)


def _furthest(one: Path, other: Path) -> float:
    """Largest relative difference of a step's loss; those of a discarded window depend on its micro-batches."""
    pairs = zip(metrics(one), metrics(other), strict=False)
    return max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs if a["applied"] and b["applied"])


def _told(run: Path, steps: int) -> list[tuple[object, ...]]:
    names = ("step", "samples", "tokens", "learning_rate", "applied")
    return [tuple(line[name] for name in names) for line in metrics(run)[:steps]]


def _grown(sizes: list[int]) -> float:
    """The second half over the first."""
    half = len(sizes) // 2
    return statistics.median(sizes[half:]) / statistics.median(sizes[:half]) if half else 1.0


def _peak(process: psutil.Process) -> int:
    """In MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) >> 10 if found else 0


def _checkpoints(run: Path) -> list[str]:
    names = (path.name for path in (run / "checkpoints").glob("*"))
    return sorted(names, key=lambda name: (len(name), name))


def _names(run: Path) -> list[str]:
    """Of all files; checkpoints by their place in the order, as the two runs stopped at different steps."""
    places = {name: f"checkpoint {place}" for place, name in enumerate(_checkpoints(run))}
    parts = (path.relative_to(run).parts for path in run.rglob("*") if path.is_file())
    return sorted("/".join(places.get(part, part) for part in each) for each in parts)


def _log(run: Path) -> str:
    return (run.parent / f"{run.name}.log").read_text()[-3000:]


def _ranks(split: tuple[int, int, int]) -> int | None:
    return None if split[0] == 1 else split[0]


def _flags(split: tuple[int, int, int]) -> list[str]:
    return ["--accum-steps", str(split[1]), "--micro-batch", str(split[2])]
