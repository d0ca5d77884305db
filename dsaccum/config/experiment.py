"""The experiment YAML: what to train. Every field, its type and its default stand here and nowhere else."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from dsaccum.config.errors import ConfigError


def _names_a_function(reference: str) -> str:
    if not re.fullmatch(r".+\.py:[A-Za-z_]\w*", reference):
        raise ConfigError("names no function", allowed="FILE.py:function", fix="write models/mine.py:build")
    return reference


def _is_a_file_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError("would be no good directory name", allowed="letters, digits, '.', '_' and '-'")
    return name


FactoryReference = Annotated[str, AfterValidator(_names_a_function)]
Beta = Annotated[float, Field(ge=0, lt=1)]
PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**31 - 1)]


class _Section(BaseModel):
    """Strict and frozen: an unknown field or a value of another type is refused, never guessed."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """Where the model comes from: exactly one of ``architecture``, ``pretrained`` and ``factory``."""

    architecture: str | None = None
    """A causal-LM ``model_type`` of transformers, e.g. ``gpt2`` or ``llama``; weights start at random."""
    config: dict[str, Any] = {}
    """Overrides of the architecture's (or the pretrained model's) transformers config."""
    pretrained: str | None = None
    """A local directory or a hub id, loaded with ``AutoModelForCausalLM.from_pretrained``."""
    factory: FactoryReference | None = None
    """``FILE.py:function``, called with ``vocabulary_size`` and ``sequence_length``; code that you trust: it is run."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    @model_validator(mode="after")
    def _has_one_origin(self) -> ModelConfig:
        given = [name for name in ("architecture", "pretrained", "factory") if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"{' and '.join(given)} are given" if given else "none is given"
            raise ConfigError(
                f"needs exactly one of architecture, pretrained and factory, and {found}",
                key="model",
                fix=f"keep one of {' and '.join(given)}" if given else "write `architecture: gpt2` under `model:`",
            )
        if self.factory is not None and self.config:
            raise ConfigError("has no effect on a model.factory", key="model.config", fix="set it inside the factory")
        return self


class DataConfig(_Section):
    """What is read, how it becomes tokens, and how tokens become samples."""

    source: Literal["python-stdlib", "python-functions", "files", "dataset"] = "python-stdlib"
    files: list[str] = []
    """Globs of text or JSON-lines files (``source: files``), relative to the working directory."""
    dataset: str | None = None
    """A hub id or a local directory (``source: dataset``), read through ``datasets``."""
    subset: str | None = None
    """The name of a part, for data sets on the hub that have several."""
    split: str = "train"
    column: str = "text"
    """The text column of JSON lines and data sets."""
    tokenizer: str = "bytes"
    """``bytes`` (ids equal to ByT5's), a local directory, or a hub id."""
    sequence_length: PositiveInt = 256
    """Tokens per sample."""
    packing: Literal["packed", "padded"] = "packed"
    last_window: Literal["continue", "drop", "short"] = "continue"
    """What becomes of the samples at an epoch's end that don't fill an effective batch."""
    seed: NonNegativeInt = 0
    """The order of samples is a function of this and the epoch alone."""

    @model_validator(mode="after")
    def _names_its_source(self) -> DataConfig:
        for field, example in (("files", '["data/*.txt"]'), ("dataset", "roneneldan/TinyStories")):
            given = bool(getattr(self, field))
            if self.source == field and not given:
                raise ConfigError(
                    f"is missing, and data.source is {field}",
                    key=f"data.{field}",
                    fix=f"write `{field}: {example}` under `data:`",
                )
            if given and self.source != field:
                raise ConfigError(
                    f"would not be read: data.source is {self.source}",
                    key=f"data.{field}",
                    fix=f"write `source: {field}` under `data:`, or delete {field}",
                )
        return self


class LossConfig(_Section):
    """A loss other than causal-LM cross entropy."""

    factory: FactoryReference | None = None
    """``FILE.py:function`` that returns an object with ``count`` and ``sum`` (see ``dsaccum.loss``)."""


class AutoConfig(_Section):
    """Values for what the DeepSpeed JSON leaves as ``"auto"``."""

    lr: Annotated[float, Field(gt=0)] | None = None
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] | None = None
    eps: Annotated[float, Field(gt=0)] | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    warmup_num_steps: PositiveInt | None = None
    warmup_min_lr: Annotated[float, Field(ge=0)] | None = None
    warmup_max_lr: Annotated[float, Field(gt=0)] | None = None
    gradient_clipping: Annotated[float, Field(ge=0)] | None = None


class RunConfig(_Section):
    """How long, what is looked at and kept on the way, and when to give up."""

    steps: PositiveInt = 100
    """Optimizer steps, i.e. windows; not micro-steps."""
    seed: NonNegativeInt = 0
    """Initial weights."""
    eval_every: NonNegativeInt = 0
    """Optimizer steps between two looks at the held-out loss; 0 for the end only."""
    checkpoint_every: NonNegativeInt = 100
    """Optimizer steps between two checkpoints; 0 for none but the one when the run stops or ends."""
    keep_checkpoints: PositiveInt = 2
    """So many of the newest checkpoints are kept."""
    on_checkpoint_error: Literal["continue", "stop"] = "continue"
    """What a run does when a checkpoint cannot be written; the last whole one is kept in any case."""
    max_minutes: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Minutes since the process began after which the run stops at a boundary, with a checkpoint."""
    timeout_s: Annotated[float, Field(gt=0, le=1e6)] = 600.0
    """The longest that any rank waits for another, in seconds."""
    max_skipped: PositiveInt = 10
    """So many skipped steps in a row end the run."""
    replica_check_every: NonNegativeInt = 100
    """Optimizer steps between two checks that all ranks hold the same parameters; 0 for none."""


class Experiment(_Section):
    """One experiment: everything but how DeepSpeed steps."""

    name: Annotated[str, AfterValidator(_is_a_file_name)]
    model: ModelConfig
    data: DataConfig = DataConfig()
    loss: LossConfig = LossConfig()
    auto: AutoConfig = AutoConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _pretrained_brings_its_tokenizer(self) -> Experiment:
        if self.model.pretrained is not None and "tokenizer" not in self.data.model_fields_set:
            raise ConfigError(
                "is missing, and a pretrained model knows the ids of its own tokenizer only",
                key="data.tokenizer",
                fix=f"write `tokenizer: {self.model.pretrained}` under `data:`",
            )
        return self
