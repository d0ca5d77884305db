"""Scripts of this folder, run as they are: watched in this process, unwatched, or on several ranks of their own."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dsaccum.engine.leftovers import forget_earlier_engines
from dsaccum.verification.records.watch import WatchRecord, WindowRecord
from dsaccum.watch.session import Session

SCRIPTS = Path(__file__).parent / "scripts"


def run_script(script: str, words: Sequence[str]) -> dict[str, Any]:
    """In this process, as ``__main__``; returns its names."""
    argv, path, state = list(sys.argv), list(sys.path), torch.get_rng_state()
    sys.argv[:] = [script, *words]
    sys.path.insert(0, str(SCRIPTS))
    try:
        return runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    finally:
        sys.argv[:], sys.path[:] = argv, path
        torch.set_rng_state(state)
        forget_earlier_engines()
        _forget_accelerate()


def _forget_accelerate() -> None:
    """It keeps what the first script of a process asked for."""
    if "accelerate" not in sys.modules:
        return
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def watched(script: str, *words: str, windows: Sequence[int] = (3,)) -> WatchRecord:
    """The record of a watched run in this process."""
    session = Session(windows, report=lambda record: None, verbose=True)
    try:
        run_script(script, words)
    finally:
        session.end()
    return session.record


def only_window(record: WatchRecord) -> WindowRecord:
    """Of a run with one engine and one window."""
    [engine] = record.engines
    [window] = engine.windows
    return window


def parameters_after(script: str, words: Sequence[str], folder: Path, *, watch: bool) -> dict[str, torch.Tensor]:
    """What a run leaves, watched or not."""
    path = folder / f"{'watched' if watch else 'plain'}.pt"
    run = watched if watch else unwatched
    run(script, *words, "--save", str(path))
    return torch.load(path)


def unwatched(script: str, *words: str) -> None:
    """The same run, left alone."""
    run_script(script, words)


def on_ranks(ranks: int, cases: Sequence[Sequence[str]], folder: Path) -> list[WatchRecord]:
    """Watched runs one after the other on ranks of their own, each [script, its words ...]; rank 0's records."""
    start_ranks(ranks, [("watched", *case) for case in cases], folder)
    return [WatchRecord.read(folder / f"record-{number}.json") for number in range(len(cases))]


def start_ranks(ranks: int, cases: Sequence[Sequence[str]], folder: Path) -> None:
    """Runs one after the other on ranks of their own, each [``watched`` or ``unwatched``, script, its words ...]."""
    listed = folder / "cases.json"
    listed.write_text(json.dumps([list(case) for case in cases]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.watch.running", str(listed)],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            cwd=Path(__file__).parent.parent.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=280)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(said)[-4000:]


def _main() -> None:
    from dsaccum.engine.process import quiet_libraries

    quiet_libraries()
    listed = Path(sys.argv[1])
    for number, (how, script, *words) in enumerate(json.loads(listed.read_text())):
        record = (watched if how == "watched" else unwatched)(script, *words)
        if record is not None and os.environ["RANK"] == "0":
            record.write(listed.parent / f"record-{number}.json")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main()
