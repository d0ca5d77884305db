"""The ways in which people call DeepSpeed: each is one that its documentation or its code makes one think right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from dsaccum.audit import loops
from dsaccum.audit.models import frozen, reference_to, unused
from dsaccum.verification.subject.loops import HF_LABELS, OUTSIDE_LOSS

Json = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One way of calling DeepSpeed.

    Attributes:
        id: for the record, and in the matrix.
        summary: what is done, in one line.
        loop: as ``Case.loop`` names it.
        rows: packed: equal numbers of targets; ragged: different ones; short: an epoch that ends after half a window.
        model: the ``model`` section of the experiment, where it is another.
        config: keys of the JSON beside those of the circumstances.
        least_steps: the smallest N with which this is another way than the plain one.
    """

    id: str
    summary: str
    loop: str
    rows: Literal["packed", "ragged", "short"] = "packed"
    model: Json = field(default_factory=dict)
    config: Json = field(default_factory=dict)
    least_steps: int = 1


def _named(function: Callable[..., Any]) -> str:
    """As the ranks find it."""
    return f"{function.__module__}:{function.__name__}"


WAYS: Final[dict[str, Way]] = {
    way.id: way
    for way in (
        Way("own-loss", "engine.backward(engine(..., labels=...).loss), engine.step()", HF_LABELS),
        Way("outside-loss", "the same, with the loss computed outside from the logits", OUTSIDE_LOSS),
        Way(
            "scale-wrt-gas-false",
            "a loss that is divided already, engine.backward(loss, scale_wrt_gas=False)",
            _named(loops.scale_wrt_gas_false),
        ),
        Way("loss-backward", "(loss / N).backward(), engine.step()", _named(loops.loss_backward)),
        Way("scaled-backward", "engine.scale(loss).backward(), engine.step()", _named(loops.scaled_loss_backward)),
        Way("no-sync", "N - 1 micro-steps inside engine.no_sync()", _named(loops.no_sync), least_steps=2),
        Way("coalesced", "N micro-steps inside engine.coalesce_grad_reduction()", _named(loops.coalesced)),
        Way(
            "boundary-override",
            "engine.set_gradient_accumulation_boundary(...) before each forward, one engine.step()",
            _named(loops.boundary_override),
        ),
        Way(
            "unmanaged",
            '"managed_gradient_accumulation": false, one engine.step() for N backward calls',
            _named(loops.unmanaged),
            config={"managed_gradient_accumulation": False},
        ),
        Way("two-backwards", "two engine.backward calls for one engine.step()", _named(loops.two_backwards)),
        Way("checkpointing", "own-loss, activations recomputed", HF_LABELS, model={"activation_checkpointing": True}),
        Way("ragged", "own-loss, rows with different numbers of targets", HF_LABELS, rows="ragged"),
        Way(
            "short-window",
            "own-loss, an epoch that ends after half a window",
            _named(loops.short_window),
            rows="short",
            least_steps=2,
        ),
        Way("frozen", "own-loss, a part of the model frozen", HF_LABELS, model={"factory": reference_to(frozen)}),
        Way("unused", "own-loss, a parameter that no forward uses", HF_LABELS, model={"factory": reference_to(unused)}),
    )
}
"""By identifier."""
