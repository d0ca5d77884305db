"""One micro-step under fake tensors, recorded: operations run on shapes alone and allocate nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from dsaccum.loss import SummedLoss, model_inputs
from dsaccum.planning.trace import Kind, MicroStep


class Recorder(TorchDispatchMode):
    """Follows storages from the operation that made them until torch frees them."""

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        super().__init__()
        self.alive = self.logits = 0
        self.logits_elements: int | None = None
        self.in_backward = False
        self.events: list[tuple[int, int, bool, int, int, int]] = []
        self._known: dict[int, Any] = {}
        for tensor in ignored:
            self._known[tensor.untyped_storage()._cdata] = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here, and without this every operation passes through a wrapper of dynamo's."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # autograd asks for it several times for each operation
            return args[0].fake_device
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **(kwargs or {}), out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._follow(tensor)
        self.note(Kind.OPERATION, flops=flops)
        return result

    def note(self, kind: Kind, subject: int = -1, flops: int = 0) -> None:
        """Something happens now."""
        self.events.append((kind, subject, self.in_backward, self.alive, self.logits, flops))

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size, of_logits = storage.nbytes(), tensor.numel() == self.logits_elements
        self.alive += size
        self.logits += size if of_logits else 0

        def freed(_: object) -> None:
            del self._known[key]
            self.alive -= size
            self.logits -= size if of_logits else 0

        self._known[key] = weakref.ref(storage, freed)

    def recorded(self) -> MicroStep:
        """All events so far."""
        kind, subject, backward, alive, logits, flops = (np.array(column) for column in zip(*self.events, strict=True))
        return MicroStep(kind, subject, backward.astype(bool), alive, logits, flops)


class _InBackward(torch.autograd.Function):
    """Tells when the backward pass comes by; DeepSpeed's own hooks at ZeRO 3 sit in the same two places."""

    @staticmethod
    def forward(ctx: Any, tell: Callable[[], None], tensor: Tensor) -> Tensor:
        ctx.tell = tell
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.tell()
        return None, gradient


def record_micro_step(
    model: nn.Module,
    loss: SummedLoss,
    micro_batch: Mapping[str, Tensor],
    *,
    logits_elements: int,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> MicroStep:
    """Run forward, loss and backward as ``WindowEngine`` does, and record what is alive.

    Args:
        model: of fake tensors; its gradients are taken away as soon as they are complete.
        loss: sum of a micro-batch.
        micro_batch: fake tensors of B rows.
        logits_elements: B x T x V.
        autocast: makes the context of the model's forward.

    Returns:
        Its events. Subjects are indices of ``model.parameters()`` and ``model.modules()``.
    """
    recorder = Recorder([*model.parameters(), *model.buffers()])
    recorder.logits_elements = logits_elements
    with _gradients_told(model, recorder), _modules_told(model, recorder), recorder:
        with autocast():
            outputs = model(**model_inputs(micro_batch))
        loss_sum = loss.sum(outputs, micro_batch)
        del outputs  # as in the engine, where they are no variable at all
        recorder.in_backward = True
        (loss_sum / 1.0).backward()
    return recorder.recorded()


@contextmanager
def _gradients_told(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    def hook_of(index: int) -> Callable[[Tensor], None]:
        def complete(parameter: Tensor) -> None:
            recorder.note(Kind.GRADIENT, index)
            parameter.grad = None

        return complete

    handles = [
        parameter.register_post_accumulate_grad_hook(hook_of(index))
        for index, parameter in enumerate(model.parameters())
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _modules_told(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    handles = []
    for index, module in enumerate(model.modules()):
        if any(True for _ in module.parameters(recurse=False)):
            handles += _hooks_of(module, index, recorder)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hooks_of(module: nn.Module, index: int, recorder: Recorder) -> list[Any]:
    def marked(kind: Kind, values: Any) -> Any:
        def mark(tensor: Tensor) -> Tensor:
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            marked_tensor: Tensor = _InBackward.apply(lambda: recorder.note(kind, index), tensor)
            return marked_tensor

        return tree_map_only(Tensor, mark, values)

    def enter(_: nn.Module, inputs: Any) -> Any:
        recorder.note(Kind.ENTER, index)
        return marked(Kind.EXIT, inputs)

    def leave(_: nn.Module, __: Any, outputs: Any) -> Any:
        recorder.note(Kind.EXIT, index)
        return marked(Kind.ENTER, outputs)

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
