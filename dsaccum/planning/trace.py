"""What one micro-step has in memory, event by event, as affine functions of the micro-batch size B.

An event is the end of an operation, a gradient that is complete, or a module that begins or ends. The same events come
for each B, in the same order, so that every one of them has its own line a + b B. Their maximum is no line: another
event may be the highest at another B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Kind(IntEnum):
    """What an event is; ``MicroStep.subject`` says of which parameter or module."""

    OPERATION = 0
    GRADIENT = 1
    """A parameter's gradient is complete and still alive; it is gone by the next event."""
    ENTER = 2
    """A module that has parameters of its own needs them from here on."""
    EXIT = 3
    """It needs them no longer."""


@dataclass(frozen=True)
class MicroStep:
    """Forward, loss and backward of one micro-batch at one B.

    Attributes:
        kind: of each event, [events].
        subject: index of the parameter (``GRADIENT``) or of the module (``ENTER``, ``EXIT``); -1 for operations.
        backward: whether the event lies in the backward pass.
        alive: bytes at the event: all that operations made and that is still held, the gradient at a ``GRADIENT``
            included; parameters, accumulated gradients and optimizer states are not.
        logits: the part of them in tensors as large as the logits.
        flops: floating-point operations of the event: matrix products and attention.
    """

    kind: IntArray
    subject: IntArray
    backward: NDArray[np.bool_]
    alive: IntArray
    logits: IntArray
    flops: IntArray

    def grown(self, slopes: tuple[IntArray, IntArray, IntArray], samples: int) -> MicroStep:
        """The same events with so many samples more."""
        alive, logits, flops = (samples * slope for slope in slopes)
        return replace(self, alive=self.alive + alive, logits=self.logits + logits, flops=self.flops + flops)

    @property
    def visits(self) -> list[int]:
        """The modules that are entered, in this order."""
        return [int(subject) for subject in self.subject[self.kind == Kind.ENTER]]


@dataclass(frozen=True)
class AffineMicroStep:
    """The same for every B: at each event ``fixed + B * per_sample``.

    Attributes:
        fixed: its events, with what does not depend on B; negative where the line does not go through zero.
        per_sample: [events] each, what comes with every sample: bytes alive, logits, floating-point operations.
    """

    fixed: MicroStep
    per_sample: tuple[IntArray, IntArray, IntArray]

    @classmethod
    def through(cls, two: MicroStep, three: MicroStep) -> AffineMicroStep:
        """The line through B = 2 and 3, event by event.

        Raises:
            ValueError: the events are not the same ones.
        """
        if len(two.kind) != len(three.kind) or (two.subject != three.subject).any():
            raise ValueError("the operations of a micro-step depend on the size of its micro-batch")
        slopes = three.alive - two.alive, three.logits - two.logits, three.flops - two.flops
        return cls(two.grown(slopes, -2), slopes)

    def at(self, micro_batch: int) -> MicroStep:
        """The micro-step of ``micro_batch`` samples."""
        return self.fixed.grown(self.per_sample, micro_batch)


def joined(parts: list[MicroStep]) -> MicroStep:
    """Parts of a micro-step in a row."""
    return MicroStep(
        np.concatenate([part.kind for part in parts]),
        np.concatenate([part.subject for part in parts]),
        np.concatenate([part.backward for part in parts]),
        np.concatenate([part.alive for part in parts]),
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.flops for part in parts]),
    )
