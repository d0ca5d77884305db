"""Learning rates that change inside a window: told, and not held to be wrong. Run: pytest tests/watch/test_schedule.py.

Not covered: schedulers of DeepSpeed's own, which the engine moves on at the boundary.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dsaccum.watch.schedule import RateLog, changed_before
from dsaccum.watch.session import Session
from tests.watch.made_windows import described_window, made_window


def train(where: str) -> None:
    """A plain loop of 3 micro-batches; the rate is moved on at ``where``."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(9):
        tokens = torch.randint(3, 20, (2, 9))
        (F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / 3).backward()
        if where == "before the step" and step % 3 == 2:
            optimizer.param_groups[0]["lr"] = 5e-4 / (step + 1)
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        if where == "micro-step" or (where == "step" and step % 3 == 2):
            scheduler.step()


def noted(where: str) -> tuple[str | None, list[str]]:
    session = Session((3,), report=lambda record: None, verbose=True)
    try:
        train(where)
    finally:
        session.end()
    [window] = session.record.engines[0].windows
    return window.verdict, window.notes


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_that_moves_on_at_each_micro_step_is_told() -> None:
    verdict, [note] = noted("micro-step")
    assert verdict == "equivalent"
    assert note.startswith("schedule-per-micro-step: the learning rate changed before each micro-step: 5.3e-04 in")
    assert "ends 3 times too early so: call scheduler.step() after optimizer.step() only" in note
    for right in ("step", "before the step"):
        assert noted(right) == ("equivalent", [])


def test_a_rate_that_is_set_once_in_a_window_is_no_schedule_of_micro_steps() -> None:
    once = made_window([0.25] * 4, rank={"rates": [(1e-3, 1e-2), (1e-3, 1e-2), (1e-3, 2e-2), (1e-3, 2e-2)]})
    assert described_window(once).notes == [
        "the learning rate changed inside the window, before micro-step 3: 1.0e-02 in the first, 2.0e-02 in the last"
    ]
    assert described_window(made_window([0.25] * 4, rank={"rates": [(1e-3,)] * 4})).notes == []


def test_what_was_not_seen_to_begin_is_not_told() -> None:
    log = RateLog()
    for micro_step in (1, 3):
        log.note(micro_step, [{"lr": 0.1 * micro_step}, {"momentum": 0.9}])
    assert log.of(3) == []
    log.note(2, [{"lr": torch.tensor(0.1)}])
    assert log.of(3) == [(0.1,), (pytest.approx(0.1),), (pytest.approx(0.3),)]
    assert log.of(4) == []
    assert changed_before([(1.0,), (1.0, 2.0), (1.0,)]) == []
