"""Each micro-batch's own gradient, computed again after the window on a copy, from the gradient that arrived.

What is recomputed is only the way from the module's outputs to its parameters: whatever the script did to its loss is
in the gradients that were recorded at the outputs. Once in the run's own precision, where the same operations round in
the same way, so that rounding cancels when weights are recovered; once in float64, which says how much of it there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsaccum.watch.beside_tokens import share_beside
from dsaccum.watch.module_copy import Skeleton, set_buffers, set_modes
from dsaccum.watch.outputs import converted, leaves
from dsaccum.watch.recording import Forward, RandomState, norm_of
from dsaccum.watch.subjects.plain import dense
from dsaccum.watch.token_log_probs import NAME, read_log_probs
from dsaccum.watch.tokens import TokenReading, read_tokens

Sketch = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


class NotRepeatable(Exception):
    """A forward can't be computed again; the message says why."""


@dataclass(frozen=True)
class Recomputed:
    """A rank's window, computed again.

    Attributes:
        columns: each micro-step's gradient in the run's own precision, sketched.
        truths: the same in float64.
        tokens: what its logits' gradients say; None where there are no logits.
        beside: the share of each micro-step's gradient that does not come from the tokens; 0 within rounding.
        truth: what the second computation ran in.
    """

    columns: list[dict[str, Tensor]]
    truths: list[dict[str, Tensor]]
    tokens: list[TokenReading | None]
    beside: list[float]
    truth: str


def recompute(
    skeleton: Skeleton,
    live: nn.Module,
    values: Mapping[str, Tensor],
    trained: Sequence[str],
    micro_steps: list[list[Forward]],
    sketch: Sketch,
) -> Recomputed:
    """Both computations.

    Args:
        skeleton: of the user's module, from before the engine.
        live: that module, which must not be touched.
        values: parameters as the forward used them.
        trained: which get a gradient.
        micro_steps: as recorded.
        sketch: makes gradients small.

    Raises:
        NotRepeatable: the module doesn't run on a copy.
    """
    with _undisturbed(live):
        own = _Copy(skeleton, values, trained, None)
        columns, tokens, beside = [], [], []
        for forwards in micro_steps:
            gradient, readings = own.gradient(forwards, tokens=True)
            columns.append(sketch(gradient))
            tokens.append(TokenReading.together(readings))
            beside.append(own.beside(forwards, gradient))
        del own
        truths, truth = _truths(skeleton, values, trained, micro_steps, sketch)
    return Recomputed(columns, truths or columns, tokens, beside, truth)


def _truths(
    skeleton: Skeleton,
    values: Mapping[str, Tensor],
    trained: Sequence[str],
    micro_steps: list[list[Forward]],
    sketch: Sketch,
) -> tuple[list[dict[str, Tensor]], str]:
    """In float64, else in float32; nothing where neither works."""
    for dtype, name in ((torch.float64, "float64"), (torch.float32, "float32")):
        try:
            exact = _Copy(skeleton, values, trained, dtype)
            return [sketch(exact.gradient(forwards, tokens=False)[0]) for forwards in micro_steps], name
        except (RuntimeError, NotImplementedError, NotRepeatable, TypeError):
            continue
    return [], "own precision"


class _Copy:
    """A filled copy of the module that computes gradients of recorded forwards."""

    def __init__(
        self, skeleton: Skeleton, values: Mapping[str, Tensor], trained: Sequence[str], dtype: torch.dtype | None
    ) -> None:
        device = next(iter(values.values())).device
        self._dtype = dtype
        self._device = device
        self._skeleton, self._values, self._trained = skeleton, values, trained
        self._module: nn.Module | None = None
        self._at_tokens: dict[int, tuple[str, Tensor]] = {}

    def gradient(self, forwards: Sequence[Forward], *, tokens: bool) -> tuple[dict[str, Tensor], list[TokenReading]]:
        """Sum over the forwards of one micro-step."""
        module = self._on(_device_of(forwards))
        module.zero_grad(set_to_none=True)
        self._at_tokens = {}
        readings = []
        for forward in forwards:
            found = self._one(module, forward, tokens=tokens)
            if found is not None:
                readings.append(found)
        return _gradients(module), readings

    def beside(self, forwards: Sequence[Forward], whole: Mapping[str, Tensor]) -> float:
        """The share of a micro-step's gradient that other terms of the loss give than the tokens'; 0 within rounding.

        From ``gradient`` with tokens, which comes first. The same again, from what arrived at the logits alone.
        """
        through = [self._at_tokens.get(id(forward)) for forward in forwards]
        if not self._at_tokens or all(
            at and {at[0]} == set(f.arrived) for f, at in zip(forwards, through, strict=True)
        ):
            return 0.0
        module = self._on(_device_of(forwards))
        module.zero_grad(set_to_none=True)
        for forward, at in zip(forwards, through, strict=True):
            if at is not None:
                self._from_tokens(module, forward, *at)
        return share_beside(whole, _gradients(module))

    def _from_tokens(self, module: nn.Module, forward: Forward, path: str, gradient: Tensor) -> None:
        found = leaves(self._output(module, forward))
        for other in forward.passed.keys() - {path}:  # an engine's own hooks there, on the way to the parameters
            if (factor := forward.factor_at(other)) != 1.0 and other in found:
                found[other].register_hook(partial(torch.mul, factor))
        found[path].backward(gradient)

    def _callable(self, module: nn.Module) -> nn.Module:
        """What ``torch.compile`` wraps, where nothing is to round as it does: it would be compiled for float64 anew."""
        inner = getattr(module, "_orig_mod", None)
        return inner if self._dtype is not None and isinstance(inner, nn.Module) else module

    def _on(self, device: torch.device) -> nn.Module:
        if self._module is None:
            self._module = self._skeleton.filled(self._values, self._trained, self._dtype, device)
        return self._module

    def _output(self, module: nn.Module, forward: Forward) -> Any:
        """Of the forward, once more."""
        set_modes(module, forward.modes)
        set_buffers(module, forward.buffers, self._dtype)
        forward.random.restore()
        cast = forward.autocast
        enabled = cast.enabled and self._dtype is None
        arguments, keywords = converted(forward.arguments, self._dtype), converted(forward.keywords, self._dtype)
        with torch.enable_grad(), torch.autocast(cast.device, dtype=cast.dtype, enabled=enabled, cache_enabled=False):
            return self._callable(module)(*arguments, **keywords)

    def _one(self, module: nn.Module, forward: Forward, *, tokens: bool) -> TokenReading | None:
        found = leaves(self._output(module, forward))
        if missing := forward.gradients.keys() - found.keys():
            raise NotRepeatable(f"a second forward gives no {sorted(missing)[0] or 'tensor with a gradient'}")
        if self._dtype is None:
            _check_repeats(forward, found)
        by_token = (_log_probs(found) or _logits(found, forward)) if tokens else None
        arrived: list[Tensor] = []
        for path in forward.arrived:
            found[path].register_hook(partial(_as_recorded, forward, path))
        if by_token is not None:
            by_token[1].register_hook(lambda gradient: arrived.append(gradient.detach()))
        paths = list(forward.gradients)
        seeds = [forward.gradients[path].to(found[path].dtype) for path in paths]
        torch.autograd.backward([found[path] for path in paths], seeds)
        if by_token is None or not arrived:
            return None
        path, values = by_token
        self._at_tokens[id(forward)] = (path, arrived[0])
        if _last(path) == NAME:
            return read_log_probs(values.detach(), arrived[0], forward.keywords)
        return read_tokens(values.detach(), arrived[0], forward.keywords, forward.arguments)


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: dense(p.grad.detach()) for name, p in module.named_parameters() if p.grad is not None}


def _check_repeats(forward: Forward, found: Mapping[str, Tensor]) -> None:
    """A copy that computes something else would make a wrong run of a right one.

    Raises:
        NotRepeatable: it does; or gradients came another way than by the outputs alone.
    """
    for path, norm in forward.norms.items():
        again = norm_of(found[path]) if path in found else 0.0
        if abs(again - norm) > min(64 * torch.finfo(found[path].dtype).eps, 0.01) * norm:
            raise NotRepeatable(
                f"a second forward gives another {path or 'output'}: something in the module has changed since the "
                "window began, or it draws from a generator of its own"
            )
    if len(forward.tasks) > 1 and any(forward.tasks.values()):
        raise NotRepeatable("a gradient is differentiated again, as a gradient penalty does")


def _as_recorded(forward: Forward, path: str, gradient: Tensor) -> Tensor:
    """In place of what arrives here on the copy: what passed in the run, wherever it came from."""
    if path in forward.gradients:
        return forward.gradients[path].to(gradient.dtype)
    return gradient * forward.factors.get(path, 1.0)


def _log_probs(found: Mapping[str, Tensor]) -> tuple[str, Tensor] | None:
    """The output that says how likely each target is, by its name."""
    return next((pair for pair in found.items() if _last(pair[0]) == NAME and pair[1].dim() == 2), None)


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _logits(found: Mapping[str, Tensor], forward: Forward) -> tuple[str, Tensor] | None:
    """The output that looks like logits: named so, else the one of the script's that a gradient arrived at."""
    shaped = {path: tensor for path, tensor in found.items() if tensor.dim() >= 2 and tensor.shape[-1] >= 2}
    named = [path for path in shaped if _last(path) == "logits"]
    given = [path for path in shaped if path in forward.gradients]
    path = next(iter([*named, *given]), None)
    return (path, shaped[path]) if path is not None else None


def _device_of(forwards: Sequence[Forward]) -> torch.device:
    return next((g.device for forward in forwards for g in forward.gradients.values()), torch.device("cpu"))


@contextmanager
def _undisturbed(live: nn.Module) -> Iterator[None]:
    """The generators are put back, and a copy that still leads to the live module is found out."""

    def refuse(*_: object) -> None:
        raise NotRepeatable("the copy of its module still calls the original, as a function kept in an attribute does")

    before = RandomState.now()
    guards = [part.register_forward_pre_hook(refuse, prepend=True) for part in live.modules()]
    try:
        yield
    finally:
        for guard in guards:
            guard.remove()
        before.restore()
