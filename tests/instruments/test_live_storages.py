"""Bytes of tensors that operations made, while they are alive.

Run: pytest tests/instruments/test_live_storages.py. Not covered: devices other than the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsaccum.instruments.live_storages import LiveStorages


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.live = LiveStorages()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.live.add(func, result)
        return result


def test_what_is_made_counts_until_it_is_freed() -> None:
    given = torch.ones(10)
    with Counting() as counting:
        made = given.exp()
        assert counting.live.bytes() == 40
        view = made[2:]
        made.add_(1)
        given.view(2, 5)  # nobody's result: it was there before
        assert counting.live.bytes() == 40
        del made
        assert counting.live.bytes() == 40  # a view holds it
        del view
        assert counting.live.bytes() == 0


def test_a_graph_holds_what_its_backward_needs() -> None:
    x = torch.ones(10, requires_grad=True)
    with Counting() as counting:
        loss = x.exp().sum()
        assert counting.live.bytes() == 44
        loss.backward()
        assert counting.live.bytes() == 44  # its gradient in place of exp's result
        x.grad = None
        assert counting.live.bytes() == 4


def test_storages_count_as_large_as_they_are_now() -> None:
    with Counting() as counting:
        made = torch.ones(10).exp()
        made.untyped_storage().resize_(0)
        assert counting.live.bytes() == 0


def test_what_only_a_cycle_holds_is_no_growth() -> None:
    class Node:
        pass

    with Counting() as counting:
        node = Node()
        node.me, node.tensor = node, torch.ones(10).exp()
        del node
        assert counting.live.bytes_at_rest(40) == 40
        assert counting.live.bytes_at_rest(0) == 0
