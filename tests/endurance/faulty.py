"""Factories for tests/endurance/fault_table.py: a model and a loss that go wrong once, on one rank.

Named on the command line as ``faulty.py:model`` and ``faulty.py:loss``. What goes wrong stands in the environment:
FAULT (kill, raise, hang, wait, nan), FAULT_PHASE (data, forward, backward), FAULT_RANK, FAULT_CALL; FAULT_MARK is a
file that is made at that moment. SLOW_DISK is how many seconds each piece takes that a checkpoint writes.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from dsaccum.durable import DurableFile
from dsaccum.loss import CausalLMLoss


class _Fault:
    def __init__(self, phase: str) -> None:
        self._armed = os.environ.get("FAULT_PHASE") == phase and os.environ["FAULT_RANK"] == os.environ["RANK"]
        self._calls = 0

    def strike(self) -> bool:
        """True where the caller is to make its result NaN."""
        self._calls += 1
        if not self._armed or self._calls != int(os.environ["FAULT_CALL"]):
            return False
        Path(os.environ["FAULT_MARK"]).touch()
        match os.environ["FAULT"]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise RuntimeError("no more")
            case "hang":
                time.sleep(3600)
            case "wait":  # a collective that the other ranks never join
                dist.recv(torch.empty(1), src=0)
        return os.environ["FAULT"] == "nan"


class _Model(torch.nn.Module):
    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(vocabulary_size, 8), torch.nn.Linear(8, vocabulary_size)
        self._forward, self._backward = _Fault("forward"), _Fault("backward")

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden = self.embedding(input_ids)
        if self._forward.strike():
            hidden = hidden * float("nan")
        if hidden.requires_grad:
            hidden.register_hook(self._at_gradient)
        return SimpleNamespace(logits=self.head(hidden))

    def _at_gradient(self, gradient: torch.Tensor) -> None:
        self._backward.strike()


class _Loss(CausalLMLoss):
    def __init__(self) -> None:
        self._fault = _Fault("data")

    def count(self, micro_batch: Any) -> int:
        self._fault.strike()
        return super().count(micro_batch)


def model(vocabulary_size: int, sequence_length: int) -> torch.nn.Module:
    if seconds := float(os.environ.get("SLOW_DISK", 0)):
        _slow_down(seconds)
    return _Model(vocabulary_size)


def loss() -> CausalLMLoss:
    return _Loss()


def _slow_down(seconds: float) -> None:
    write = DurableFile.write

    def slowly(self: DurableFile, data: Any) -> int:
        time.sleep(seconds)
        return write(self, data)

    DurableFile.write = slowly  # type: ignore[method-assign]
