"""One micro-step under fake tensors, recorded: operations run on shapes alone and allocate nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from dsaccum.loss import SummedLoss, model_inputs
from dsaccum.planning.trace import Kind, MicroStep

_LARGEST_REAL = 2**26
"""Elements of a tensor of whole numbers that is computed really."""


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
            return args[0].device if not isinstance(args[0], FakeTensor) else args[0].fake_device
        result = _computed(func, args, kwargs or {})
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            result = _as_the_kernel_lays_it_out(*result)
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


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on shapes alone, or, where it makes whole numbers of whole numbers that are there, a real one.

    Models look at token ids, positions and masks before they choose how to attend, and do other things where they
    cannot. Weights and all that is computed from them have no values, so that nothing depends on those.
    """
    if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
        return func(*args, **kwargs)
    try:
        result = func(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        result = None
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if any(tensor.is_floating_point() or tensor.numel() > _LARGEST_REAL for tensor in tensors):
        return result
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _as_the_kernel_lays_it_out(attention: Tensor, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [B, H, T, D] with T before H in memory, so that joining the heads needs no copy.

    Shapes alone come out as the query lies (``meta__scaled_dot_product_flash_attention_for_cpu``), and then it does.
    """
    order = (0, 2, 1, 3)
    return torch.empty_permuted(attention.shape, order, dtype=attention.dtype, device=attention.device), logsumexp


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
