"""Ways of calling DeepSpeed that are wrong on purpose: what the audit must see through."""

from __future__ import annotations

from dsaccum.audit.loops import Window, each_window
from dsaccum.instruments.gradients import read_gradients


@each_window
def divides_once_more(window: Window) -> None:
    for micro_batch in window.micro_batches:
        window.engine.backward(window.forward(micro_batch) / window.steps)
        window.engine.step()


@each_window
def forgets_a_micro_batch(window: Window) -> None:
    for position, micro_batch in enumerate(window.micro_batches):
        loss = window.forward(micro_batch)
        window.engine.backward(loss * 0 if position == 1 else loss)
        window.engine.step()


@each_window
def asks_for_what_is_not_there(window: Window) -> None:
    window.api("a_method_of_tomorrow")()


@each_window
def raises_in_deepspeed(window: Window) -> None:
    window.engine.backward(window.forward(window.micro_batches[0]).expand(2))


@each_window
def cannot_be_watched(window: Window) -> None:
    """Right, but under capture our own instruments raise."""
    for micro_batch in window.micro_batches:
        if hasattr(window._windows, "after_micro_step"):
            read_gradients(window.engine)
        window.engine.backward(window.forward(micro_batch))
        window.engine.step()


@each_window
def raises_watched_or_not(window: Window) -> None:
    if hasattr(window._windows, "after_micro_step"):
        read_gradients(window.engine)
    window.engine.backward(window.forward(window.micro_batches[0]).expand(2))
