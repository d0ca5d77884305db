"""Models and loops out of the ordinary: each trains as it would alone, and gets a right verdict, none, or a reason.

Run: pytest tests/watch/test_odd_scripts.py. The loops themselves are in ``odd_scripts``; controls of right verdicts are
in ``test_frameworks``. Not covered: hooks of a script's own that change something outside the model, which are called
on the copy, too.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dsaccum.verification.records.watch import WatchRecord
from dsaccum.watch.session import Session
from tests.watch.odd_models import Model, train
from tests.watch.odd_scripts import NONE, RIGHT, SAID, alternating, scaler_that_skips, two_models


def run(script: Callable[[], nn.Module]) -> list[Tensor]:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    left = [value.clone() for value in nn.Module.state_dict(script()).values()]
    return [*left, torch.tensor([torch.rand(()), random.random(), np.random.rand()])]


def watch(script: Callable[[], nn.Module]) -> tuple[list[Tensor], WatchRecord]:
    session = Session(report=lambda record: None)
    try:
        return run(script), session.record
    finally:
        session.end()


@pytest.mark.parametrize("script", [*RIGHT, *NONE, alternating, *(script for script, _ in SAID)])
def test_it_trains_as_it_would_alone(script: Callable[[], nn.Module]) -> None:
    """Parameters and generators, to the bit."""
    run(script)  # what is compiled rounds differently the first time
    alone, (watched, record) = run(script), watch(script)
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(alone, watched, strict=True))
    if script in RIGHT:
        assert record.verdict == "equivalent"
        assert record.unproven == []
    if script in NONE:
        assert record.verdict is None
        assert record.engines[0].windows[0].claims.which("fail") == []
    for odd, said in SAID:
        if odd is script:
            assert record.engines == []
            assert said in " ".join(record.unproven)


def test_a_skipped_step_is_told_as_skipped() -> None:
    _, record = watch(scaler_that_skips)
    [message] = record.messages
    assert message.startswith("optimizer step 3 was skipped by its GradScaler, for a gradient was not finite")
    assert [window.window for window in record.engines[0].windows] == [3]


def test_two_models_are_both_looked_at() -> None:
    _, record = watch(two_models)
    assert [engine.windows[0].verdict for engine in record.engines] == ["equivalent", "equivalent"]


def test_of_two_models_in_turn_each_is_judged_by_its_own_backward() -> None:
    _, record = watch(alternating)
    [judge, _] = (engine.windows[0] for engine in record.engines)
    assert judge.verdict == "equivalent"
    assert judge.effective_batch.accumulation_steps == 1
    assert "another model is trained in between" in judge.reasons["memory"]


def test_models_that_are_not_watched_are_not_kept_alive() -> None:
    session = Session(report=lambda record: None)
    train(Model())
    later = Model()
    gone = weakref.ref(later)
    train(later)
    del later
    gc.collect()
    assert gone() is None
    session.end()
    assert len(session.record.unproven) == 1
