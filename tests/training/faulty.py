"""Factories for tests/training/test_failures.py: a model and a loss that go wrong on one rank, at one moment.

Named on the command line as ``faulty.py:model`` and ``faulty.py:loss``; what goes wrong stands in the environment:
FAULT (kill, hang, raise), FAULT_PHASE (data, forward), FAULT_RANK, FAULT_CALL.
"""

from __future__ import annotations

import os
import signal
import time

import torch

from dsaccum.loss import CausalLMLoss


class _Fault:
    def __init__(self, phase: str) -> None:
        self._armed = os.environ.get("FAULT_PHASE") == phase and os.environ["FAULT_RANK"] == os.environ["RANK"]
        self._calls = 0

    def strike(self) -> None:
        self._calls += 1
        if not self._armed or self._calls != int(os.environ["FAULT_CALL"]):
            return
        match os.environ["FAULT"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(3600)
            case "raise":
                raise RuntimeError("no more")


class _Model(torch.nn.Module):
    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(vocabulary_size, 8), torch.nn.Linear(8, vocabulary_size)
        self._fault = _Fault("forward")

    def forward(self, input_ids: torch.Tensor):
        self._fault.strike()
        from types import SimpleNamespace

        return SimpleNamespace(logits=self.head(self.embedding(input_ids)))


class _Loss(CausalLMLoss):
    def __init__(self) -> None:
        self._fault = _Fault("data")

    def count(self, micro_batch) -> int:
        self._fault.strike()
        return super().count(micro_batch)


def model(vocabulary_size: int, sequence_length: int) -> torch.nn.Module:
    return _Model(vocabulary_size)


def loss() -> CausalLMLoss:
    return _Loss()
