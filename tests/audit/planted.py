"""Ways of calling DeepSpeed that are wrong on purpose: what the audit must see through."""

from __future__ import annotations

from typing import Any

from dsaccum.audit.ways import NoSuchApi, _way


@_way
def divides_once_more(window: Any) -> None:
    for micro_batch in window.micro_batches:
        window.engine.backward(window.forward(micro_batch) / window.steps)
        window.engine.step()


@_way
def forgets_a_micro_batch(window: Any) -> None:
    for position, micro_batch in enumerate(window.micro_batches):
        loss = window.forward(micro_batch)
        window.engine.backward(loss * 0 if position == 1 else loss)
        window.engine.step()


@_way
def asks_for_what_is_not_there(window: Any) -> None:
    window.api("a_method_of_tomorrow")()


@_way
def raises_in_deepspeed(window: Any) -> None:
    window.engine.backward(window.forward(window.micro_batches[0]).expand(2))


@_way
def old_word(window: Any) -> None:
    raise NoSuchApi("engine.old_word")
