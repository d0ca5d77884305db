"""The circumstances in which DeepSpeed is tried: which there are, and a choice in which every pair of them comes up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import product
from typing import Final, Literal

from dsaccum.audit.ways import WAYS
from dsaccum.power.settings import cover_pairs

PrecisionName = Literal["fp32", "bf16", "fp16", "autocast"]
OptimizerName = Literal["SGD", "AdamW", "FusedAdam"]
Clipping = Literal["off", "on", "absent"]

STAGES: Final = (0, 1, 2, 3)
PRECISIONS: Final[tuple[PrecisionName, ...]] = ("fp32", "bf16", "fp16", "autocast")
OPTIMIZERS: Final[tuple[OptimizerName, ...]] = ("AdamW", "SGD", "FusedAdam")
CLIPPINGS: Final[tuple[Clipping, ...]] = ("off", "on", "absent")
ACCUMULATION_STEPS: Final = (4, 1)


@dataclass(frozen=True)
class Circumstances:
    """What a DeepSpeed JSON says.

    Attributes:
        zero_stage: 0 to 3.
        precision: of forward and backward.
        optimizer: AdamW is torch's, FusedAdam DeepSpeed's own AdamW.
        accumulation_steps: N.
        clipping: off (a limit of 0), on (a limit below every norm), or the key absent, which reads as off.
    """

    zero_stage: int
    precision: PrecisionName = "fp32"
    optimizer: OptimizerName = "AdamW"
    accumulation_steps: int = 4
    clipping: Clipping = "off"


@dataclass(frozen=True)
class Cell:
    """One way of calling DeepSpeed in one set of circumstances."""

    way: str
    circumstances: Circumstances


@dataclass(frozen=True)
class Abilities:
    """What can be run here.

    Attributes:
        fp16: DeepSpeed accepts fp16 on this machine.
        fused_adam: FusedAdam is there without minutes of compiling: on a GPU.
        autocast: DeepSpeed has ``torch_autocast``.
    """

    fp16: bool
    fused_adam: bool
    autocast: bool = True


def why_untested(circumstances: Circumstances, abilities: Abilities) -> str | None:
    """Why these cannot be tried here; None where they can."""
    if circumstances.precision == "fp16" and not abilities.fp16:
        return "needs a GPU"
    if circumstances.precision == "autocast" and not abilities.autocast:
        return "this DeepSpeed has no torch_autocast"
    if circumstances.optimizer == "FusedAdam" and not abilities.fused_adam:
        return "would be compiled for this CPU: left to GPUs"
    return None


def every_cell(abilities: Abilities) -> list[Cell]:
    """All combinations that mean something and can be tried here, way by way."""
    parts = product(STAGES, PRECISIONS, OPTIMIZERS, ACCUMULATION_STEPS, CLIPPINGS)
    possible = [each for each in (Circumstances(*part) for part in parts) if why_untested(each, abilities) is None]
    return [Cell(way, each) for way in WAYS for each in possible if each.accumulation_steps >= WAYS[way].least_steps]


def suspected_cells(abilities: Abilities) -> list[Cell]:
    """Where DeepSpeed was once seen to be wrong, or where it does one thing at one stage and another at the next."""
    return [cell for cell in _suspected() if why_untested(cell.circumstances, abilities) is None]


_SUSPECTED_WAYS: Final = (
    "scale-wrt-gas-false",
    "loss-backward",
    "scaled-backward",
    "no-sync",
    "coalesced",
    "two-backwards",
    "short-window",
    "unused",
)
_SUSPICIOUS: Final = (  # N = 4 throughout: with N = 1 most of what is suspected cannot show
    Circumstances(0),
    Circumstances(1, clipping="on"),
    Circumstances(1, precision="bf16", optimizer="SGD"),
    Circumstances(2, precision="bf16"),
    Circumstances(3, clipping="on"),
)


def _suspected() -> Iterator[Cell]:
    for circumstances in _SUSPICIOUS:
        for way in ("own-loss", *_SUSPECTED_WAYS):
            yield Cell(way, circumstances)
    for stage in STAGES:
        yield Cell("own-loss", Circumstances(stage, clipping="absent"))
    for optimizer in OPTIMIZERS:
        yield Cell("own-loss", Circumstances(0, precision="bf16", optimizer=optimizer))
        for stage in (0, 1):
            yield Cell("own-loss", Circumstances(stage, precision="fp16", optimizer=optimizer, clipping="on"))


def pairwise_cells(abilities: Abilities) -> list[Cell]:
    """The suspected cells, and as few more as hold every pair of circumstances that some cell holds; way by way."""
    cells = every_cell(abilities)
    suspected = suspected_cells(abilities)
    chosen = cover_pairs({cell: (cell.way, *astuple(cell.circumstances)) for cell in cells}, suspected)
    return sorted(chosen, key=cells.index)
