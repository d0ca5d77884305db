"""A third implementation: Hugging Face Accelerate's ``accumulate`` steps where we step and ends at the same parameters.

Run: pytest -n 0 tests/seeds/test_accelerate_agrees.py. One process on the CPU; N = 4, two windows, AdamW, no clipping.
Not covered: Accelerate's own DeepSpeed integration, several ranks.

No bound is needed: the forwards are the same operations in the same shapes, both divide each loss by N = 4, which is
exact, add the micro-batches' gradients up in order in float32, and hand them to torch's AdamW. The parameters are equal
to the bit. On ragged rows Accelerate has to be fed what our engine feeds, the sum over T / N: it knows no targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dsaccum.batch import is_update_boundary
from dsaccum.data import WindowStream
from dsaccum.engine.process import Ranks
from dsaccum.loss import CausalLMLoss
from tests.cases import BETAS, EPS, WEIGHT_DECAY, Case, stream_of, tiny_gpt
from tests.seeds.watched import run_watched

RATE, N, WINDOWS = 1e-3, 4, 2


class Constant(Case):
    """AdamW at one rate: Accelerate is to step no schedule."""

    @property
    def config(self) -> dict[str, Any]:
        kept = {key: value for key, value in super().config.items() if key != "scheduler"}
        kept["optimizer"]["params"]["lr"] = RATE
        return kept


def case_of(padded: bool) -> Case:
    return Constant(accumulation_steps=N, micro_batch=4, steps=WINDOWS, clipping=0.0, padded=padded)


@contextmanager
def no_launcher() -> Iterator[None]:
    """Accelerate reads a launcher's variables, which these tests' only rank has set for DeepSpeed."""
    from accelerate.state import AcceleratorState

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
        AcceleratorState._reset_state(reset_partial_state=True)


@no_launcher()
def with_accelerate(
    stream: WindowStream, accumulation_steps: int, *, own_means: bool
) -> tuple[list[bool], dict[str, Tensor]]:
    """As its guide has it: whether it synchronised at each micro-step, and the parameters at the end."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation_steps)
    micro_batches = [micro_batch for window in range(WINDOWS) for micro_batch in stream.window(window)]
    loss, total = CausalLMLoss(), [sum(map(CausalLMLoss().count, stream.window(window))) for window in range(WINDOWS)]
    model: nn.Module = tiny_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    loader: DataLoader = DataLoader(micro_batches, batch_size=None, shuffle=False)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    synchronised = []
    for index, micro_batch in enumerate(loader):
        with accelerator.accumulate(model):
            outputs = model(input_ids=micro_batch["input_ids"], attention_mask=micro_batch.get("attention_mask"))
            count = loss.count(micro_batch) if own_means else total[index // N] / N
            accelerator.backward(loss.sum(outputs, micro_batch) / count)
            optimizer.step()
            optimizer.zero_grad()
            synchronised.append(accelerator.sync_gradients)
    return synchronised, {name: parameter.detach() for name, parameter in model.named_parameters()}


def differing(found: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in other.items() if not torch.equal(found[name], tensor)]


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "ragged"])
def test_same_boundaries_and_same_parameters(one_rank: Ranks, padded: bool) -> None:
    case = case_of(padded)
    stepped: list[bool] = []

    def look(engine: Any, step: int, micro_step: int, phase: str) -> None:
        if phase == "step":
            stepped.append(bool(engine.engine.is_gradient_accumulation_boundary()))

    _, ours = run_watched(one_rank, case, look)
    synchronised, theirs = with_accelerate(stream_of(case, one_rank), N, own_means=not padded)
    assert synchronised == stepped == [False, False, False, True] * WINDOWS
    assert [is_update_boundary(micro_step, N) for micro_step in range(1, 1 + N * WINDOWS)] == stepped
    assert differing(ours, theirs) == []


def test_another_n_is_noticed(one_rank: Ranks) -> None:
    """Control: two steps in each window."""
    case = case_of(False)
    _, ours = run_watched(one_rank, case)
    synchronised, theirs = with_accelerate(stream_of(case, one_rank), 2, own_means=True)
    assert synchronised == [False, True] * 2 * WINDOWS
    assert len(differing(ours, theirs)) == len(theirs)


def test_own_means_on_ragged_rows_are_noticed(one_rank: Ranks) -> None:
    """Control: as the guide has it, each micro-batch's own mean, which is not the big batch."""
    case = case_of(True)
    _, ours = run_watched(one_rank, case)
    _, theirs = with_accelerate(stream_of(case, one_rank), N, own_means=True)
    assert len(differing(ours, theirs)) == len(theirs)
