"""The product's own training loop over a small case, with somebody who looks at the engine at every phase of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from dsaccum.data import WindowStream
from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.instruments.gradients import read_masters
from dsaccum.loss import CausalLMLoss
from dsaccum.training.control import ControlExchange
from dsaccum.training.loop import TrainingLoop
from dsaccum.training.metrics import StepMetrics
from dsaccum.training.stop_request import StopRequest
from tests.cases import Case, stream_of, tiny_gpt

Look = Callable[[WindowEngine, int, int, str], None]
"""look(engine, step, micro_step, phase), both counted from 1; micro-step 0 is before the first."""


class Watcher:
    """Stands where the watchdog stands, which is told of every phase before it begins."""

    def __init__(self, engine: WindowEngine, look: Look) -> None:
        self._engine, self._look = engine, look

    def at(self, step: int, micro_step: int, phase: str) -> None:
        self._look(self._engine, step, micro_step, phase)


def run_watched(
    ranks: Ranks,
    case: Case,
    look: Look = lambda *_: None,
    *,
    model: Any = None,
    loss: CausalLMLoss | None = None,
    stream: WindowStream | None = None,
) -> tuple[list[float], dict[str, Any]]:
    """Losses by step and parameters at the end (on rank 0). ``look`` is also called at the very end, phase "end"."""
    engine = WindowEngine(model or tiny_gpt(), case.config, case.batch, loss or CausalLMLoss())
    metrics: list[StepMetrics] = []
    loop = TrainingLoop(
        engine=engine,
        stream=stream or stream_of(case, ranks),
        exchange=ControlExchange(ranks.rank, engine.device),
        watchdog=Watcher(engine, look),
        stop=StopRequest(),
        record=metrics.append,
        note=lambda _: None,
    )
    loop.run(case.steps, case.max_skipped)
    look(engine, case.steps + 1, 0, "end")
    state = engine.full_state_dict() or {}
    parameters = {name: tensor.clone() for name, tensor in state.items()}
    engine.engine.destroy()
    return [step.loss for step in metrics if step.loss is not None], parameters


def digest(engine: WindowEngine) -> str:
    """Of what the optimizer steps, to the bit; a collective at ZeRO 1 to 3."""
    total = hashlib.sha256()
    for name, tensor in read_masters(engine.engine).items():
        total.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return total.hexdigest()
