"""One weight, whole numbers: every gradient, loss and update is worked out here, and the test compares bits.

Run: pytest -n 0 tests/seeds/test_hand_worked.py. Not covered: rounding, of which there is none.

The model gives w x, the loss of a target is (w x)**2 / 2, its gradient w x**2. w starts at 2, SGD's rate is 1/8. N = 4
micro-batches of two rows hold 1, 2, 4 and 1 targets in window 1, and 3, 1, 2 and 2 in window 2: T = 8 both times. What
is no target holds a 9, so that nothing of it can go unseen. Every number below is a whole one over a power of two.

    window 1, w = 2             x of the targets    n    sum of x**2
        micro-batch 1           4                   1    16
        micro-batch 2           1 3                 2    10
        micro-batch 3           1 2 2 1             4    10
        micro-batch 4           2                   1    4
        T = 8, sum 40: gradient 2 x 40/8 = 10    loss 2**2 / 2 x 40/8 = 10    w = 2 - 10/8 = 0.75

    window 2, w = 3/4
        micro-batches           2 2 2 | 4 | 1 1 | 1 1    sums 12, 16, 2, 2
        T = 8, sum 32: gradient 3/4 x 32/8 = 3    loss 9/16 / 2 x 4 = 9/8    w = 3/4 - 3/8 = 0.375

On two ranks with N = 2, micro-batch (k, r) is number 2 k + r, and nothing changes: each rank is fed S / d with
d = T / (N W) = 2, divided by N = 2, averaged over W = 2.

The wrong answers to window 1, each from a loop that people do write:

    mean of means               w x (16/1 + 10/2 + 10/4 + 4/1) / 4 = 13.75    w = 2 - 13.75/8 = 0.28125
    nobody divides by N         4 x 10 = 40                                   w = 2 - 40/8 = -3
    divided twice               10 / 4 = 2.5                                  w = 2 - 2.5/8 = 1.6875
    only the last micro-batch   2 x 4/8 = 1                                   w = 2 - 1/8 = 1.875
    padding counted             16 places, 2 x 40/16 = 5                      w = 2 - 5/8 = 1.375
    earlier ones counted twice  2 x (40 + 36)/8 = 19                          w = 2 - 19/8 = -0.375
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsaccum.batch import EffectiveBatch
from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine, WindowOutcome
from dsaccum.reference import Reference, due_weights, split_window
from dsaccum.reference_optimizers import SGD, rebuild_optimizer
from tests.instruments.shared import measured_once

START, RATE, T = 2.0, 0.125, 8
WINDOWS = [
    [[[4, 0], [0, 0]], [[1, 3], [0, 0]], [[1, 2], [2, 1]], [[2, 0], [0, 0]]],
    [[[2, 2], [2, 0]], [[4, 0], [0, 0]], [[1, 1], [0, 0]], [[1, 0], [0, 1]]],
]
"""Window, micro-batch, row, place; 0 is no target."""
GRADIENTS, LOSSES, WEIGHTS = [10.0, 3.0], [10.0, 1.125], [0.75, 0.375]


class OneWeight(nn.Module):
    """Gives w x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([START]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class HalfSquares:
    """The loss of a target is half the square of the output."""

    def count(self, micro_batch: Any) -> int:
        return int((micro_batch["labels"] == 1).sum())

    def sum(self, outputs: Any, micro_batch: Any) -> Tensor:
        return outputs[micro_batch["labels"] == 1].square().sum() / 2


def micro_batches(window: int) -> list[dict[str, Tensor]]:
    found = []
    for rows in WINDOWS[window]:
        x = torch.tensor(rows, dtype=torch.float32)
        found.append({"x": torch.where(x == 0, 9.0, x), "labels": torch.where(x == 0, -100, 1)})
    return found


def config(batch: EffectiveBatch, stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": batch.total,
        "gradient_accumulation_steps": batch.accumulation_steps,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 16, "allgather_bucket_size": 16},
    }


def engine_of(batch: EffectiveBatch, stage: int) -> WindowEngine:
    return WindowEngine(OneWeight(), config(batch, stage), batch, HalfSquares())


def weight_of(engine: WindowEngine) -> float | None:
    state = engine.full_state_dict()
    return None if state is None else state["w"].item()


def losses_of(outcome: WindowOutcome) -> float:
    return float(outcome.micro_losses.sum())


def train(ranks: Ranks, stage: int) -> list[tuple[float | None, float, float | None]]:
    """By window: the norm of the gradient, this rank's part of the loss, and the weight after it (on rank 0)."""
    batch = EffectiveBatch(ranks.world_size, 4 // ranks.world_size, 2)
    engine, found = engine_of(batch, stage), []
    for window in range(2):
        outcome = engine.run_window(micro_batches(window)[ranks.rank :: ranks.world_size], T)
        found.append((outcome.gradient_norm, losses_of(outcome) / T, weight_of(engine)))
    engine.engine.destroy()
    return found


def train_at_all_stages(ranks: Ranks) -> list[Any]:
    return [train(ranks, stage) for stage in range(4)]


def test_the_data_are_those_of_the_table() -> None:
    for window, counts, sums in ((0, [1, 2, 4, 1], [16, 10, 10, 4]), (1, [3, 1, 2, 2], [12, 16, 2, 2])):
        parts = micro_batches(window)
        assert [HalfSquares().count(part) for part in parts] == counts
        assert [float(part["x"][part["labels"] == 1].square().sum()) for part in parts] == sums


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_is_exact(one_rank: Ranks, stage: int) -> None:
    assert train(one_rank, stage) == list(zip(GRADIENTS, LOSSES, WEIGHTS, strict=True))


@pytest.mark.distributed
def test_two_ranks_are_exact_at_every_stage(tmp_path_factory: pytest.TempPathFactory) -> None:
    first, second = measured_once(tmp_path_factory, "seeds-hand-worked", train_at_all_stages, world_size=2)
    for stage in range(4):
        assert [norm for norm, _, _ in first[stage]] == [norm for norm, _, _ in second[stage]] == GRADIENTS
        assert [a[1] + b[1] for a, b in zip(first[stage], second[stage], strict=True)] == LOSSES
        assert [weight for _, _, weight in first[stage]] == WEIGHTS
    assert first[0][0][1] == 2 * (16 + 10) / 8, "control: a rank alone has a part of the loss only"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_reference_is_exact(dtype: torch.dtype) -> None:
    optimizer = rebuild_optimizer({"type": "SGD", "params": {"lr": RATE}})
    assert isinstance(optimizer, SGD)
    values = {"w": torch.tensor([START], dtype=dtype)}
    for window in range(2):
        parts = [[part] for part in micro_batches(window)]
        parts = [[{**part, "x": part["x"].to(dtype)} for part in step] for step in parts]
        whole = {name: torch.cat([step[0][name] for step in parts]) for name in ("x", "labels")}
        reference = Reference(OneWeight(), dtype=dtype, loss=HalfSquares()).at(values)
        big, small = reference.big_batch(whole), reference.accumulated(parts)
        assert big.gradient["w"].item() == small.gradient["w"].item() == GRADIENTS[window]
        assert big.loss == small.loss == LOSSES[window]
        assert big.targets == small.targets == T
        values, _ = optimizer.step(values, small.gradient, {})
        assert values["w"].item() == WEIGHTS[window]
    cut = split_window(whole, accumulation_steps=4, world_size=1)
    assert all(torch.equal(a[0]["x"], b[0]["x"]) for a, b in zip(cut, parts, strict=True))
    assert due_weights([[1], [2], [4], [1]]) == [[0.125], [0.25], [0.5], [0.125]]


def _own_means(engine: Any, sums: list[Tensor], counts: list[int]) -> None:
    for part, count in zip(sums, counts, strict=True):
        engine.backward(part / count)
        engine.step()


def _undivided(engine: Any, sums: list[Tensor], counts: list[int]) -> None:
    for part in sums:
        engine.backward(part / 2, scale_wrt_gas=False)
        engine.step()


def _divided_twice(engine: Any, sums: list[Tensor], counts: list[int]) -> None:
    for part in sums:
        engine.backward(part / 2 / 4)
        engine.step()


def _only_the_last(engine: Any, sums: list[Tensor], counts: list[int]) -> None:
    for part in sums:
        engine.module.w.grad = None
        engine.backward(part / 2)
        engine.step()


def _padding_counted(engine: Any, sums: list[Tensor], counts: list[int]) -> None:
    for part in sums:
        engine.backward(part / 4)  # 16 places / N
        engine.step()


def _counted_twice(engine: Any, sums: list[Tensor], counts: list[int]) -> None:
    for index, part in enumerate(sums):
        engine.backward(part / 2 * (1 if index == 3 else 2))
        engine.step()


@pytest.mark.parametrize(
    ("loop", "weight"),
    [
        (_own_means, 0.28125),
        (_undivided, -3.0),
        (_divided_twice, 1.6875),
        (_only_the_last, 1.875),
        (_padding_counted, 1.375),
        (_counted_twice, -0.375),
    ],
)
def test_wrong_loops_give_the_wrong_answers_worked_out(
    one_rank: Ranks, loop: Callable[..., None], weight: float
) -> None:
    """Controls: through the same engine, to the bit what the table says, and nowhere near 0.75."""
    engine = engine_of(EffectiveBatch(1, 4, 2), 0)
    parts, loss = micro_batches(0), HalfSquares()
    sums = [loss.sum(engine.engine(part["x"]), part) for part in parts]
    loop(engine.engine, sums, [loss.count(part) for part in parts])
    assert weight_of(engine) == weight != WEIGHTS[0]
    engine.engine.destroy()
