"""Mistakes on the command line, said like all other mistakes of the user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsaccum.config.errors import ConfigError, nearest


def is_usage_error(error: Exception) -> bool:
    """Whether typer, rather than a command, raised it."""
    return hasattr(error, "format_message")


def as_config_error(error: Any, words: Sequence[str]) -> ConfigError:
    """What typer raised, in our words.

    Args:
        error: a usage error of typer; told by its attributes, as the classes have no public place.
        words: the command line.
    """
    command = getattr(getattr(error, "ctx", None), "command", None)
    flag, parameter = getattr(error, "option_name", None), getattr(error, "param", None)
    see_help = f"see {' '.join(['dsaccum', *(word for word in words[:1] if not word.startswith('-'))])} --help"
    if flag is not None and hasattr(error, "possibilities"):
        guess = nearest(flag, _flags(command))
        return ConfigError("there is no such flag", key=flag, fix=guess or see_help)
    if flag is not None:
        return ConfigError("needs a value", key=flag, fix=see_help)
    if parameter is not None:
        return _wrong_value(error, parameter.opts, words, see_help)
    commands = getattr(command, "commands", {})
    if commands and words:
        guess = nearest(words[0], commands)
        return ConfigError(
            f"there is no command {words[0]!r}", fix=f"dsaccum {guess}" if guess else "see dsaccum --help"
        )
    return ConfigError(_clause(error.format_message()), source="command line", fix=see_help)


def in_one_spelling(words: Sequence[str]) -> list[str]:
    """DeepSpeed's own ``--deepspeed --deepspeed_config FILE`` as ``--deepspeed FILE``."""
    if not any(word.partition("=")[0] == "--deepspeed_config" for word in words):
        return list(words)
    return [word.replace("--deepspeed_config", "--deepspeed", 1) for word in words if word != "--deepspeed"]


def _wrong_value(error: Any, flags: Sequence[str], words: Sequence[str], see_help: str) -> ConfigError:
    given = [
        word.partition("=")[2] or following
        for word, following in zip(words, [*words[1:], ""], strict=True)
        if word.partition("=")[0] in flags
    ]
    problem = "is no whole number" if "integer" in error.message else _clause(error.message)
    return ConfigError(problem, key=flags[0], fix=see_help, **({"value": given[-1]} if given else {}))


def _flags(command: Any) -> list[str]:
    parameters = getattr(command, "params", [])
    return [option for parameter in parameters for option in parameter.opts if option.startswith("--")]


def _clause(message: str) -> str:
    """A sentence of typer's, to stand within our line."""
    text = message.strip().rstrip(".")
    return text[:1].lower() + text[1:]
