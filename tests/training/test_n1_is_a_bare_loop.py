"""N = 1 is a bare DeepSpeed loop, to the bit: the accumulation logic leaves no trace where nothing accumulates.

Run: pytest tests/training/test_n1_is_a_bare_loop.py. Not covered: several ranks (the averaging has its own rounding).
"""

from __future__ import annotations

import deepspeed
import pytest
import torch
import torch.nn.functional as F

from dsaccum.engine.process import Ranks
from tests.cases import Case, run_dsaccum, stream_of, tiny_gpt

STEPS = 5


def bare_deepspeed_loop(case: Case, ranks: Ranks, rate_factor: float = 1.0) -> dict[str, torch.Tensor]:
    """As the DeepSpeed tutorial has it: forward, mean loss, backward, step."""
    model = tiny_gpt()
    config = case.config
    config["scheduler"]["params"]["warmup_max_lr"] *= rate_factor
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    stream = stream_of(case, ranks)
    for step in range(STEPS):
        (batch,) = stream.window(step)
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = engine(**inputs).logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), batch["labels"][:, 1:].reshape(-1))
        engine.backward(loss)
        engine.step()
    state = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    engine.destroy()
    return state


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "ragged"])
@pytest.mark.parametrize("clipping", [0.0, 1.0], ids=["unclipped", "clipped"])
def test_parameters_are_bit_identical(one_rank: Ranks, padded: bool, clipping: float) -> None:
    case = Case(steps=STEPS, padded=padded, clipping=clipping)
    ours, bare = run_dsaccum(one_rank, case).parameters, bare_deepspeed_loop(case, one_rank)
    assert ours.keys() == bare.keys()
    assert max(float((ours[name] - bare[name]).abs().max()) for name in bare) == 0.0


def test_another_rate_is_noticed(one_rank: Ranks) -> None:
    """Control: a learning rate one part in a million higher changes bits."""
    case = Case(steps=STEPS)
    ours, bare = run_dsaccum(one_rank, case).parameters, bare_deepspeed_loop(case, one_rank, 1 + 1e-6)
    assert max(float((ours[name] - bare[name]).abs().max()) for name in bare) > 0.0
