"""Peak memory does not grow with N beyond the one gradient buffer, and a kept graph is seen.

Run: pytest tests/instruments/test_memory.py. Micro-batches are made before the measurement: they are the window's data,
not its memory. Not covered: CUDA's allocator (no GPU here).
"""

from __future__ import annotations

from typing import Any

import pytest

from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.instruments.gradients import read_masters
from dsaccum.instruments.memory import MemoryUse, measure_memory
from dsaccum.loss import CausalLMLoss
from tests.cases import Case, stream_of, tiny_gpt

PARAMETERS = 27584


class Keeper(CausalLMLoss):
    """A loss that keeps a tensor of each micro-batch's graph, as a list of undetached outputs would."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def sum(self, outputs: Any, micro_batch: Any) -> Any:
        self.kept.append(outputs.logits * 1.0)
        return super().sum(outputs, micro_batch)


def case_of(stage: int, steps: int) -> Case:
    return Case(accumulation_steps=steps, micro_batch=8, stage=stage, num_samples=200)


class TwoForwards(CausalLMLoss):
    """Calls the model once more before the micro-step's backward, as contrastive losses do."""

    model: Any = None

    def sum(self, outputs: Any, micro_batch: Any) -> Any:
        again = self.model(input_ids=micro_batch["input_ids"])
        return (super().sum(outputs, micro_batch) + super().sum(again, micro_batch)) / 2


def half_frozen_gpt() -> Any:
    model = tiny_gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.0" not in name)
    return model


def used(ranks: Ranks, stage: int, steps: int, loss: CausalLMLoss | None = None, model: Any = None) -> MemoryUse:
    case = case_of(stage, steps)
    engine = WindowEngine(model or tiny_gpt(), case.config, case.batch, loss or CausalLMLoss())
    if isinstance(loss, TwoForwards):
        loss.model = engine.engine
    first, second = (stream_of(case, ranks).window(number) for number in (0, 1))
    engine.run_window(first, 100.0)
    use = measure_memory(engine.engine, [lambda: engine.run_window(second, 100.0)])
    assert {"backward", "step"}.isdisjoint(vars(engine.engine))
    engine.engine.destroy()
    return use


def slope(fewer: MemoryUse, more: MemoryUse, micro_steps: int) -> float:
    """Growth of the peak per micro-step, as a share of the activations."""
    return abs(more.peak_bytes - fewer.peak_bytes) / micro_steps / fewer.by_category["activation"]


@pytest.mark.parametrize("stage", [0, 1])
def test_flat_in_n_but_for_one_gradient_buffer(one_rank: Ranks, stage: int) -> None:
    one, two, eight = (used(one_rank, stage, steps) for steps in (1, 2, 8))
    assert slope(two, eight, 6) < 0.01
    buffer = 4 * PARAMETERS
    assert 0.8 * buffer <= two.peak_bytes - one.peak_bytes <= 1.0 * buffer
    assert two.by_category["gradient"] == buffer
    assert two.by_category["parameter"] == buffer
    # Adam's two states, and 24 counts at ZeRO 0; at ZeRO 1 also the masters and the one count of the flat partition.
    assert two.by_category["optimizer"] // buffer == (2 if stage == 0 else 3)
    assert sum(two.by_category.values()) == two.peak_bytes
    assert all(two.highest[name] >= size for name, size in two.by_category.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_accumulated_gradients_are_gradients(one_rank: Ranks, stage: int) -> None:
    two, four = (used(one_rank, stage, steps) for steps in (2, 4))
    assert slope(two, four, 2) < 0.01
    assert two.highest["gradient"] >= 4 * PARAMETERS


@pytest.mark.parametrize("stage", [0, 1])
def test_what_stands_in_forward(one_rank: Ranks, stage: int) -> None:
    """Nothing of the gradient with N = 1, all of it with more; at ZeRO 1 DeepSpeed's reduce bucket stays there too."""
    one, two = (used(one_rank, stage, steps).in_forward for steps in (1, 2))
    assert (one["gradient"], two["gradient"]) == (0, 4 * PARAMETERS)
    assert two["temporary"] - one["temporary"] == (4 * 20_000 if stage else 0)
    ids_and_loss = 8 * 16 * 8 + 4
    assert two["activation"] - one["activation"] == ids_and_loss


def test_two_forwards_in_a_micro_step(one_rank: Ranks) -> None:
    """MemTracker by itself gives up at the second one."""
    two, four = (used(one_rank, 0, steps, TwoForwards()) for steps in (2, 4))
    assert slope(two, four, 2) < 0.01
    assert two.highest["activation"] > 1.8 * used(one_rank, 0, 2).highest["activation"]


def test_frozen_parameters(one_rank: Ranks) -> None:
    """MemTracker by itself raises: it hooks them like the others. One of two layers is frozen, 12,704 elements."""
    use = used(one_rank, 0, 2, model=half_frozen_gpt())
    assert use.by_category["parameter"] == 4 * PARAMETERS
    assert use.by_category["gradient"] == 4 * (PARAMETERS - 12_704)


def test_kept_graphs_are_seen(one_rank: Ranks) -> None:
    """Control: the same check fails where every micro-step's graph stays alive."""
    two, four = (used(one_rank, 0, steps, Keeper()) for steps in (2, 4))
    # 8 rows x 16 tokens x 50 logits x 4 bytes each time, which is some 3 % of the activations.
    assert slope(two, four, 2) > 0.02


def test_the_measured_run_is_bit_identical(one_rank: Ranks) -> None:
    masters = []
    for measured in (True, False):
        case = case_of(1, 2)
        engine = WindowEngine(tiny_gpt(), case.config, case.batch, CausalLMLoss())
        windows = [stream_of(case, one_rank).window(number) for number in range(3)]
        calls = [lambda window=window, engine=engine: engine.run_window(window, 100.0) for window in windows]
        if measured:
            measure_memory(engine.engine, calls)
        else:
            for call in calls:
                call()
        masters.append(read_masters(engine.engine))
        engine.engine.destroy()
    assert all(masters[0][name].equal(masters[1][name]) for name in masters[0])
