"""What a verification is asked for, checked as far as that costs nothing: no file is run and no library loaded."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsaccum.config.errors import ConfigError, nearest
from dsaccum.verification.diagnosis.causes import ADVICE

LOOPS: Final = ("dsaccum", "hf-labels", "outside-loss")
"""The loops that are ours to name; any other is the user's ``FILE.py:function``."""
MOST_STEPS: Final = 64
_LOOP_SPELLING: Final = f"{', '.join(LOOPS)}, or FILE.py:function"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What every verification is told, whatever it verifies.

    Args:
        ranks: W; None for as many as there are cores, at most 2.
        steps: windows to compare, 1 to 64.
        accumulation_steps: N; None for that of the JSON or the checkpoint, or what follows from B.
        micro_batch: B; None for that of the JSON or the checkpoint, or what follows from N.
        fault: identifier of a fault to inject, or ``FILE.py:function`` that gives one.
        remedies: whether our remedies for DeepSpeed's faults are applied.
        strict: whether a substitution or an untested claim counts as not carried out.
        verbose: whether libraries may log.
        command: the command line as it was given, for the record.

    Raises:
        ConfigError: a number is out of its range, or there is no such fault.
    """

    ranks: int | None = None
    steps: int = 3
    accumulation_steps: int | None = None
    micro_batch: int | None = None
    fault: str | None = None
    remedies: bool = True
    strict: bool = False
    verbose: bool = False
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_range("--ranks", self.ranks, "is no number of ranks")
        check_range("--steps", self.steps, "is no number of steps that can be compared", most=MOST_STEPS)
        check_range("--accum-steps", self.accumulation_steps, "is no number of accumulation steps")
        check_range("--micro-batch", self.micro_batch, "is no micro-batch size")
        if self.fault is not None:
            _check_fault(self.fault)


@dataclass(frozen=True)
class VerifyArguments(Arguments):
    """What the command line, or a caller of ``dsaccum.verify``, said.

    Args:
        deepspeed: the DeepSpeed JSON.
        experiment: the experiment YAML; None for the default one.
        loop: ``dsaccum``, ``hf-labels``, ``outside-loss``, or ``FILE.py:function``.
        full_size: whether a large model is verified as it is, not as a shrunk copy.
        overrides: ``section.key=value`` for fields of the YAML.

    Raises:
        ConfigError: there is no such loop, and as all ``Arguments``.
    """

    deepspeed: Path
    experiment: Path | None = None
    loop: str = "dsaccum"
    full_size: bool = False
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loop not in LOOPS:
            _check_loop(self.loop)


def check_range(flag: str, number: int | None, problem: str, most: int | None = None) -> None:
    """Refuse a number below 1 or above ``most``.

    Raises:
        ConfigError: it is.
    """
    if number is None or 1 <= number <= (most or number):
        return
    raise ConfigError(problem, key=flag, value=number, allowed=f"1 to {most}" if most else "1 or more")


def _check_loop(loop: str) -> None:
    path_text, colon, name = loop.rpartition(":")
    if not (colon and path_text):
        guess = nearest(loop, LOOPS)
        raise ConfigError(
            "there is no such loop",
            key="--loop",
            value=loop,
            allowed=_LOOP_SPELLING,
            fix=f"--loop {guess}" if guess else None,
        )
    path = Path(path_text)
    try:
        names = set(_names_in(ast.parse(path.read_bytes(), filename=path_text)))
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
        raise ConfigError(problem, key="--loop", value=loop, allowed=_LOOP_SPELLING) from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python ({error})", key="--loop", value=loop) from None
    if name not in names and "*" not in names:
        guess = nearest(name, names)
        fix = f"--loop {path_text}:{guess}" if guess else f"define {name} in {path}"
        raise ConfigError(f"{path} has no function {name!r}", key="--loop", value=loop, fix=fix)


def _check_fault(fault: str) -> None:
    """Refuse a misspelt identifier; whether a fault can be put into the case is found out later."""
    if ":" in fault:
        return
    if unknown := [each for each in fault.split("+") if each not in ADVICE]:
        guess = nearest(unknown[0], ADVICE)
        raise ConfigError(
            "there is no such fault",
            key="--inject",
            value=fault,
            fix=f"--inject {guess}" if guess else "dsaccum faults lists them",
        )


def _names_in(module: ast.Module) -> Iterator[str]:
    """Names that a file may have at its top level, wherever they are bound; ``*`` where that cannot be known."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
