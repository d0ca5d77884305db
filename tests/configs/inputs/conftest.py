"""What the tests of the front door share: the installed schema with other machines, and experiments to go with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from dsaccum.config.experiment import AutoConfig, Experiment, ModelConfig, RunConfig
from dsaccum.config.schema import DeepSpeedSchema, Machine
from dsaccum.engine.schema import installed_schema

_PLAIN_CPU = Machine(device="cpu", has_compiler=True, supports_fp16=False)


@pytest.fixture(scope="session")
def schema_on() -> Callable[..., DeepSpeedSchema]:
    """The installed DeepSpeed's schema, on a machine of the test's choosing."""

    def build(**facts: Any) -> DeepSpeedSchema:
        return dataclasses.replace(installed_schema(), machine=dataclasses.replace(_PLAIN_CPU, **facts))

    return build


@pytest.fixture(scope="session")
def bare_experiment() -> Experiment:
    """An experiment of 100 steps that has no value for any "auto"."""
    return Experiment(name="bare", model=ModelConfig(architecture="gpt2"), run=RunConfig(steps=100))


@pytest.fixture(scope="session")
def full_experiment() -> Experiment:
    """The same with a value for every "auto"."""
    auto = AutoConfig(
        lr=1e-3, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1, warmup_num_steps=10, gradient_clipping=1.0
    )
    return Experiment(name="full", model=ModelConfig(architecture="gpt2"), auto=auto, run=RunConfig(steps=100))
