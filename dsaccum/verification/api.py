"""``dsaccum.verify``: a verification as a function call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsaccum.engine.process import quiet_libraries
from dsaccum.verification.cases.arguments import VerifyArguments
from dsaccum.verification.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from dsaccum.verification.ranks.pools import RankPools
    from dsaccum.verification.records.record import VerifyRecord


def verify(
    deepspeed: str | Path,
    *,
    experiment: str | Path | None = None,
    ranks: int | None = None,
    steps: int = 3,
    accumulation_steps: int | None = None,
    micro_batch: int | None = None,
    loop: str = "dsaccum",
    fault: str | None = None,
    remedies: bool = True,
    full_size: bool = False,
    overrides: Sequence[str] = (),
    verbose: bool = False,
    progress: Progress | None = None,
    pools: RankPools | None = None,
) -> VerifyRecord:
    """Prove, or refute, that N accumulated micro-batches give the update of one big batch.

    Args:
        deepspeed: the DeepSpeed JSON.
        experiment: the experiment YAML; None for the default one.
        ranks: data-parallel ranks; None for as many as there are cores, at most 2.
        steps: windows to compare, 1 to 64.
        accumulation_steps: N instead of the JSON's.
        micro_batch: B instead of the JSON's.
        loop: ``dsaccum``, ``hf-labels``, ``outside-loss``, or ``FILE.py:function``, where function(engine, micro_batch)
            gives the loss that is handed to ``engine.backward``.
        fault: identifier of a fault to inject, or ``FILE.py:function`` that gives one.
        remedies: whether our remedies for DeepSpeed's faults are applied.
        full_size: whether a large model is verified as it is, not as a shrunk copy.
        overrides: ``section.key=value`` for fields of the YAML.
        verbose: whether libraries may log.
        progress: is told what happens; None for silence.
        pools: started ranks to use; None for ranks that start and end with this call.

    Returns:
        What was found. ``verdict`` is ``"equivalent"``, ``"not_equivalent"``, or None where gradient or update could
        not be tested.

    Raises:
        ConfigError: the input is wrong; one line says what to mend.
        RankFailed: it could not be carried out.
    """
    arguments = VerifyArguments(
        deepspeed=Path(deepspeed),
        experiment=None if experiment is None else Path(experiment),
        ranks=ranks,
        steps=steps,
        accumulation_steps=accumulation_steps,
        micro_batch=micro_batch,
        loop=loop,
        fault=fault,
        remedies=remedies,
        full_size=full_size,
        overrides=tuple(overrides),
        verbose=verbose,
    )
    if not verbose:
        quiet_libraries()
    from dsaccum.verification.verify import verify as carry_out  # torch comes with it: not for a wrong argument

    return carry_out(arguments, progress or SilentProgress(), pools)
