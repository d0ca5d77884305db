"""What DeepSpeed says when it cannot start, as a mistake that the user can mend."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from dsaccum.config.errors import ConfigError


def refusal(error: Exception, model: nn.Module, *, config: str | Path, experiment: str | Path) -> ConfigError:
    """Whatever DeepSpeed's parts raise, a value of the config caused it, or the model.

    Args:
        error: as raised while the engine was built.
        model: that it was built from.
        config: the DeepSpeed JSON, for the message.
        experiment: the YAML, likewise.
    """
    reason = " ".join(str(error).split())
    said = f"({type(error).__name__}: {reason})"
    scalar = next((name for name, parameter in model.named_parameters() if parameter.dim() == 0), None)
    if scalar is not None and "dim" in reason:
        problem = f"DeepSpeed cannot send the parameter {scalar}, which has no dimension, to other ranks {said}"
        return ConfigError(problem, source=experiment, key="model", fix="give it the shape [1]")
    return ConfigError(f"DeepSpeed cannot start with this config {said}", source=config)
