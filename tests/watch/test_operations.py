"""Operations are seen, and the run's own modes, backward passes and processes are left as they were.

Run: pytest tests/watch/test_operations.py. Not covered: CUDA's threads, and versions of torch that cannot run
what they have compiled under a mode.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

from dsaccum.watch.operations import OperationWatch, aside


class Seen:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.errors: list[Exception] = []
        self.watch = OperationWatch(self.see, self.errors.append)

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.names.append(func._opname)


class Own(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _nothing_stays() -> Any:
    yield
    assert _len_torch_dispatch_stack() == 0
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_operations_of_forward_and_backward_are_seen() -> None:
    seen, x = Seen(), torch.ones(3, requires_grad=True)
    x.exp().sum().backward()
    seen.watch.stop()
    x.sin()
    assert {"exp", "sum", "mul"} <= set(seen.names)  # exp's backward multiplies
    assert "sin" not in seen.names


def test_what_is_done_aside_is_not_seen_by_anybody() -> None:
    one, other = Seen(), Seen()
    with aside():
        torch.ones(2).exp()
    torch.ones(2).cos()
    one.watch.stop()
    torch.ones(2).sin()
    other.watch.stop()
    assert "exp" not in one.names + other.names
    assert ("cos" in one.names, "cos" in other.names) == (True, True)
    assert ("sin" in one.names, "sin" in other.names) == (False, True)


def test_under_another_mode_nothing_is_seen() -> None:
    with Own():
        seen = Seen()
        torch.ones(2)
        seen.watch.stop()
    assert seen.names == []
    assert "another TorchDispatchMode" in str(seen.watch.reason)


def test_another_mode_that_is_open_at_the_end_stays_open() -> None:
    seen, own = Seen(), Own()
    with own:
        torch.ones(2)
        seen.watch.stop()
        before = own.count
        torch.ones(2)
        assert own.count > before
    assert seen.names


def test_a_stop_within_backward_waits_for_its_end() -> None:
    """Taken off there, it would be put back on; told is nobody either way."""
    seen, x = Seen(), torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda _: seen.watch.stop())
    y.sum().backward()
    known = len(seen.names)
    torch.ones(2).sin()
    assert len(seen.names) == known
    assert _len_torch_dispatch_stack() == 1
    seen.watch.stop()


def test_a_failure_is_told_once_and_stops_it() -> None:
    errors: list[Exception] = []

    def broken(*_: Any) -> None:
        raise RuntimeError("it broke")

    watch = OperationWatch(broken, errors.append)
    assert torch.ones(2).sum() == 2
    assert len(errors) == 1
    watch.stop()


def test_a_forked_process_is_rid_of_it() -> None:
    """Or else a data loader's workers would be slow for as long as they live."""
    seen = Seen()
    child = os.fork()
    if child == 0:
        os._exit(_len_torch_dispatch_stack())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _len_torch_dispatch_stack() == 1
    seen.watch.stop()
