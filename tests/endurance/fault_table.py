"""Every fault of docs/failures.md put into a run of two ranks: how it ends, what stays behind, and whether it goes on.

Run: python -m tests.endurance.fault_table [NAME ...] prints the table; test_fault_table.py holds each row to what is
promised. A run has 12 steps and a checkpoint after 5 and 10; faults strike in step 8, micro-step 2. Then the same
command continues it without the fault, and its end is compared with that of a run that had none, to the bit.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.endurance.running import differences, metrics
from tests.training.launching import environment, free_port, train_command

FACTORY = Path(__file__).parent / "faulty.py"
TIMEOUT_S, STEPS, LIMIT_S = 30, 12, 300.0
STEP, CALL = 8, 4 * 7 + 2
"""Forward and backward run four times a step, and targets are counted as often: call 30 is micro-step 2 of step 8."""
FLAGS = [
    "--set", f"model={{factory: '{FACTORY}:model'}}", "--set", f"loss.factory={FACTORY}:loss", "--micro-batch", "2",
    "--set", "data.sequence_length=32", "--set", f"run.timeout_s={TIMEOUT_S}", "--steps", str(STEPS),
    "--set", "run.checkpoint_every=5", "--set", "auto.warmup_num_steps=1",
]  # fmt: skip
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Row:
    """How one fault went.

    Attributes:
        name: of the fault.
        seconds: from the fault to the end of the last process; where it is there from the start, from our line.
        code: of the launcher.
        message: our line, or what stands in the metrics.
        processes, segments: that were left, of this run.
        goes_on: how the run that was continued compares: ``exact``, or what differs.
        said: all that was printed.
    """

    name: str
    seconds: float
    code: int
    message: str
    processes: int
    segments: int
    goes_on: str
    said: str = ""


@dataclass(frozen=True)
class Ended:
    """A command that has ended, with all of its processes or without."""

    code: int
    said: str
    told: float
    ended: float
    left: int
    segments: int

    @property
    def error(self) -> str:
        """Our own line, the first one."""
        return next((line for line in self.said.splitlines() if line.startswith("error: ")), "")


def run_to_its_end(
    command: list[str], cwd: Path, env: dict[str, str], beside: Callable[[], None] = lambda: None
) -> Ended:
    """Until the last process of the family has ended, or ``LIMIT_S``; what is left is counted, then killed."""
    before, log, started, told = _segments(), cwd / f"{time.time_ns()}.log", time.time(), 0.0
    family: dict[int, psutil.Process] = {}
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT, text=True)
        leader = psutil.Process(process.pid)
        while process.poll() is None and time.time() - started < LIMIT_S:
            beside()
            if not told and "\nerror: " in log.read_text():
                told = time.time()
            try:
                family |= {each.pid: each for each in leader.children(recursive=True)}
            except psutil.Error:
                break
            time.sleep(0.05)
    code = process.poll()
    _, left = psutil.wait_procs([*family.values()], timeout=10)
    ended = time.time() - (10 if left else 0)
    for each in left:
        each.kill()
    if code is None:
        process.kill()
        code = process.wait()
        left.append(leader)
    mine = {str(pid) for pid in (*family, process.pid)}
    stayed = [name for name in _segments() - before if any(pid in name for pid in mine)]
    return Ended(code, log.read_text(), told or ended, ended, len(left), len(stayed))


def by_hand(cwd: Path, flags_of_ranks: list[list[str]]) -> Ended:
    """Two ranks without a launcher; the code is the larger one."""
    place = f"WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}"
    first, second = (
        f"{place} RANK={rank} LOCAL_RANK={rank} {shlex.join(train_command(*FLAGS, *flags, ranks=None))}"
        for rank, flags in enumerate(flags_of_ranks)
    )
    script = f"{first} & {second}; second=$?; wait $!; first=$?; exit $((first > second ? first : second))"
    return run_to_its_end(["bash", "-c", script], cwd, environment())


def _segments() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


class Bench:
    """One folder, one run without a fault, and as many with one as are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: dict[tuple[str, ...], Path] = {}

    def whole(self, *flags: str) -> Path:
        """The run that nothing happened to."""
        if flags not in self._whole:
            run = self.folder / f"whole-{len(self._whole)}"
            ended = by_hand(self.folder, [["--output-dir", run.name, *flags]] * 2)
            assert ended.code == 0, ended.said
            self._whole[flags] = run
        return self._whole[flags]

    def train(
        self, run: Path, *flags: str, beside: Callable[[], None] = lambda: None, port: int = 0, **env: str
    ) -> Ended:
        """By the DeepSpeed launcher, on two ranks."""
        command = train_command(*FLAGS, "--output-dir", run.name, *flags, ranks=2, port=port)
        return run_to_its_end(command, self.folder, environment(**env), beside)

    def struck(self, name: str, fault: str, phase: str, rank: int = 1) -> Row:
        """A fault on one rank in mid-run."""
        run, mark = self.folder / name, self.folder / f"{name}.mark"
        ended = self.train(
            run, FAULT=fault, FAULT_PHASE=phase, FAULT_RANK=str(rank), FAULT_CALL=str(CALL), FAULT_MARK=str(mark)
        )
        assert mark.exists(), ended.said
        return self.row(name, ended, ended.ended - mark.stat().st_mtime, ended.error, self.continued(run))

    def continued(self, run: Path, *flags: str) -> str:
        """Continue it by the same flags, and compare. Started by hand, which takes half as long as by the launcher."""
        ended = by_hand(self.folder, [["--output-dir", run.name, *flags]] * 2)
        if ended.code:
            return f"code {ended.code}: {ended.error}"
        return ", ".join(differences(self.whole(*flags), run)) or "exact"

    def row(self, name: str, ended: Ended, seconds: float, message: str, goes_on: str) -> Row:
        """All of it."""
        return Row(name, seconds, ended.code, message, ended.left, ended.segments, goes_on, ended.said)


def not_a_number(bench: Bench) -> Row:
    """Skipped by all; the continued run is one that lost its last checkpoint."""
    run, mark = bench.folder / "nan", bench.folder / "nan.mark"
    fault = {
        "FAULT": "nan",
        "FAULT_PHASE": "forward",
        "FAULT_RANK": "1",
        "FAULT_CALL": str(CALL),
        "FAULT_MARK": str(mark),
    }
    ended = bench.train(run, **fault)
    message = next((line for line in ended.said.splitlines() if "skipped" in line), "")
    skipped = [line["step"] for line in metrics(run) if not line["applied"]]
    assert skipped == [STEP], ended.said
    again = bench.folder / "nan-again"
    shutil.copytree(run, again)
    shutil.rmtree(again / f"checkpoints/step-{STEPS}")
    shutil.rmtree(again / "model")
    record = json.loads((again / "run.json").read_text())
    (again / "run.json").write_text(json.dumps({**record, "status": "running"}))
    on = by_hand(bench.folder, [["--output-dir", again.name]] * 2)
    goes_on = ", ".join(differences(run, again)) or "exact" if on.code == 0 else on.error
    return bench.row("NaN in one micro-batch", ended, 0.0, message, goes_on)


def a_file_that_disappears(bench: Bench) -> Row:
    """Gone when the first step is done; the run needs it no more, a continued one does."""
    from dsaccum.power.small_case import write_text

    file, run = write_text(bench.folder), bench.folder / "file"
    flags = ["--set", "data.source=files", "--set", f"data.files=[{file}]"]
    bench.whole(*flags)
    aside = file.with_suffix(".aside")

    def remove() -> None:
        if (
            file.exists()
            and run.is_dir()
            and (run / "metrics.jsonl").is_file()
            and (run / "metrics.jsonl").stat().st_size
        ):
            file.rename(aside)

    ended = bench.train(run, *flags, beside=remove)
    assert aside.exists(), ended.said
    same = ", ".join(differences(bench.whole(*flags), run)) or "exact"
    refused = bench.train(run, *flags, "--steps", str(STEPS + 1))
    aside.rename(file)
    message = f"none; continued without it: code {refused.code}, {refused.error}"
    return bench.row("a data file disappears", ended, 0.0, message, same)


def a_slow_disk(bench: Bench) -> Row:
    """So long for every piece of a checkpoint that it takes longer than ``run.timeout_s``."""
    run = bench.folder / "slow"
    ended = bench.train(run, "--set", f"run.checkpoint_every={STEPS}", SLOW_DISK="0.4")
    longest = [line for line in ended.said.splitlines() if line.startswith("checkpoint ")]
    goes_on = ", ".join(differences(bench.whole(), run)) or "exact" if ended.code == 0 else ended.error
    message = f"none; {' '.join(longest[0].split()[1:])}" if longest and not ended.code else ended.error
    return bench.row("a slow disk", ended, 0.0, message, goes_on)


def unequal_data(bench: Bench) -> Row:
    """Rank 1 reads another file, as on another machine."""
    from dsaccum.power.small_case import write_text

    folder = bench.folder / "apart"
    folder.mkdir()
    file = write_text(folder)
    other = folder / "other.txt"
    other.write_text(file.read_text() + " more")
    own = ["--output-dir", "run", "--set", "data.source=files", "--set"]
    ended = by_hand(folder, [[*own, f"data.files=[{each}]"] for each in (file, other)])
    nothing = "nothing to continue" if not (folder / "run").exists() else "it has made a directory"
    return bench.row("unequal data on ranks", ended, ended.ended - ended.told, ended.error, nothing)


def a_stale_lock(bench: Bench) -> Row:
    """Of the operation that DeepSpeed compiles at its first start on a CPU, left by a start that was killed."""
    extensions = bench.folder / "extensions"
    for name in ("deepspeed_shm_comm", "fused_adam"):
        (extensions / name).mkdir(parents=True)
        (extensions / name / "lock").touch()
    run = bench.folder / "lock"
    ended = bench.train(run, TORCH_EXTENSIONS_DIR=str(extensions))
    goes_on = ", ".join(differences(bench.whole(), run)) or "exact" if ended.code == 0 else ended.error
    return bench.row("a stale extension lock", ended, 0.0, ended.error or "none", goes_on)


def a_port_in_use(bench: Bench) -> Row:
    """Somebody else listens there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = bench.folder / "port"
        ended = bench.train(run, port=taken.getsockname()[1])
    nothing = "nothing to continue" if not run.exists() else "it has made a directory"
    return bench.row("a port in use", ended, ended.ended - ended.told, ended.error, nothing)


FAULTS: dict[str, Callable[[Bench], Row]] = {
    "killed": lambda bench: bench.struck("a rank is killed", "kill", "forward"),
    "first-killed": lambda bench: bench.struck("rank 0 is killed", "kill", "forward", rank=0),
    "raises": lambda bench: bench.struck("a rank raises", "raise", "forward"),
    "hangs-in-data": lambda bench: bench.struck("a rank hangs in data", "hang", "data"),
    "hangs-in-forward": lambda bench: bench.struck("a rank hangs in forward", "hang", "forward"),
    "hangs-in-collective": lambda bench: bench.struck("a rank hangs in a collective", "wait", "backward"),
    "nan": not_a_number,
    "file": a_file_that_disappears,
    "slow-disk": a_slow_disk,
    "unequal-data": unequal_data,
    "stale-lock": a_stale_lock,
    "port": a_port_in_use,
}


@contextmanager
def bench() -> Iterator[Bench]:
    """In a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="fault-table-") as folder:
        yield Bench(Path(folder))


def line(row: Row) -> str:
    """Of the table, in Markdown."""
    took = f"{row.seconds:.0f} s" if row.seconds else "-"
    message = f"`{row.message}`" if row.message and not row.message.startswith("none") else row.message
    cells = [row.name, took, str(row.code), message, str(row.processes), str(row.segments), row.goes_on]
    return "| " + " | ".join(cells) + " |"


HEAD = """| fault | ends after | code | what is said | processes left | segments left | continued |
|---|---|---|---|---|---|---|"""


def main(names: list[str]) -> None:
    print(HEAD, flush=True)
    with bench() as here:
        for name in names or FAULTS:
            row = FAULTS[name](here)
            print(line(row), flush=True)
            if os.environ.get("SHOW"):
                print(row.said, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
