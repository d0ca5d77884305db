"""A model whose reference would take too long is verified as a shrunk copy: fewer layers, narrower, shorter rows.

Accumulation goes wrong in the loop, the engine and the loss; those run unchanged. The copy keeps the architecture, and
thereby every code path of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn

from dsaccum.batch import EffectiveBatch
from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import Experiment, ModelConfig
from dsaccum.model import build_model
from dsaccum.probe import LONGEST
from dsaccum.verification.cases.case import Vocabulary
from dsaccum.verification.cases.smaller_config import fewer_layers, narrower, own_name, widths

REFERENCE_RATE = 4.6e9
"""Parameters x tokens per second and pass, in float64: 2,500 tokens/s of the default model's 1.85 million."""
_NOT_OF_THE_MODEL = ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


@dataclass(frozen=True)
class Fitted:
    """The model to verify.

    Attributes:
        experiment: builds the model; its sequence length is that of the verified rows.
        model: in this process, float32 on the CPU.
        whole: parameters of the model that the user has.
        notes: what was shrunk, one line; none where nothing was.
    """

    experiment: Experiment
    model: nn.Module
    whole: int
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Of the verified model; tied ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def trained_sizes(self) -> list[int]:
        """Elements of each trained parameter."""
        return [parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def share(self) -> float:
        """Parameters of the verified model over those of the user's; 1 where they are the same model."""
        return self.parameters / self.whole


@dataclass(frozen=True)
class Patience:
    """How long the reference may compute, in seconds of one core.

    Args:
        most_s: beyond it a copy is verified instead.
        wanted_s: what the copy should come down to.
    """

    most_s: float = 8.0
    wanted_s: float = 2.0


@dataclass(frozen=True)
class Work:
    """What the reference has to do, in passes over a window in float64.

    At each step the big batch in float64, and in the config's precision, three times as fast, that and the
    micro-batches; two passes more for additivity.

    Args:
        batch: of the case.
        steps: of the case.
        patience: with it.
    """

    batch: EffectiveBatch
    steps: int
    patience: Patience = field(default_factory=Patience)

    def seconds(self, parameters: int, sequence_length: int) -> float:
        """Of one core, roughly."""
        return parameters * self.batch.total * sequence_length * (5 / 3 * self.steps + 2) / REFERENCE_RATE

    def is_too_long(self, parameters: int, sequence_length: int) -> bool:
        """Whether a copy is verified instead."""
        return self.seconds(parameters, sequence_length) > self.patience.most_s

    def is_short(self, parameters: int, sequence_length: int) -> bool:
        """Whether a copy need not be smaller."""
        return self.seconds(parameters, sequence_length) <= self.patience.wanted_s


def fit_model(
    experiment: Experiment, vocabulary: Vocabulary, work: Work, lengths: Sequence[int], source: str, *, full_size: bool
) -> Fitted:
    """Build the experiment's model, or a shrunk copy where the reference would need too long.

    Args:
        experiment: as the user wrote it.
        vocabulary: of the tokenizer; it keeps its size.
        work: of the case.
        lengths: sequence lengths to choose from, longest first, see ``windows.shorter_lengths``.
        source: the experiment's file, for messages.
        full_size: never shrink.

    Raises:
        ConfigError: the model cannot be built as the user wrote it.
    """
    build = partial(_build, vocabulary=vocabulary, source=source)
    length = experiment.data.sequence_length
    plain = _without_weights(experiment)
    parameters = None if plain is None else _count(plain, build)
    if plain is not None and parameters is not None:
        if not full_size and work.is_too_long(parameters, length):
            copy = _smaller_copy(experiment, plain, parameters, build, work, lengths)
            if copy is not None:
                return copy
        _refuse_what_has_no_room(parameters, work.batch.world_size, source)
    model = build(experiment)
    fitted = Fitted(experiment, model, sum(parameter.numel() for parameter in model.parameters()))
    if full_size or not work.is_too_long(fitted.whole, length):
        return fitted
    return _shorter_rows(fitted, build, work, lengths)


def _build(experiment: Experiment, *, vocabulary: Vocabulary, source: str) -> nn.Module:
    return build_model(
        experiment.model,
        vocabulary_size=vocabulary.size,
        sequence_length=experiment.data.sequence_length,
        seed=experiment.run.seed,
        end_token=vocabulary.end_token,
        pad_token=vocabulary.pad_token,
        source=source,
    )


def _count(experiment: Experiment, build: Any) -> int | None:
    """Parameters of the model, without any memory for them; None where it cannot be built that way."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in build(experiment).parameters())
    except ConfigError:
        return None


def _without_weights(experiment: Experiment) -> Experiment | None:
    """The same with random weights, so that sizes can be changed; None where a factory or a broken file decides."""
    model = experiment.model
    if model.architecture is not None:
        return experiment
    if model.pretrained is None:
        return None
    from transformers import AutoConfig

    try:
        written = AutoConfig.from_pretrained(model.pretrained)
        base = AutoConfig.for_model(written.model_type)
    except Exception:  # build_model says what is wrong with it
        return None
    own = {
        name: value
        for name, value in written.to_diff_dict().items()
        if name in base.to_dict() and name not in _NOT_OF_THE_MODEL and "drop" not in name
    }
    mine = {own_name(base, name): value for name, value in model.config.items()}
    copy = ModelConfig(
        architecture=written.model_type,
        config={**own, **mine},
        activation_checkpointing=model.activation_checkpointing,
    )
    return experiment.model_copy(update={"model": copy})


def _smaller_copy(
    experiment: Experiment, plain: Experiment, parameters: int, build: Any, work: Work, lengths: Sequence[int]
) -> Fitted | None:
    """The largest copy that comes down to the work wanted, cut in layers, then in width, then in length.

    None where an architecture allows no cut that works.
    """
    config = _config_of(plain, build)
    for cut_layers, cut_width in ((True, True), (False, True), (True, False)):
        fields = fewer_layers(config) if cut_layers else {}
        copy = _resized(plain, fields)
        size = _count(copy, build) or parameters
        for width in widths(config) if cut_width else ():
            if work.is_short(size, copy.data.sequence_length):
                break
            candidate = _resized(plain, {**fields, **narrower(config, width)})
            if (smaller := _count(candidate, build)) is not None:
                copy, size = candidate, smaller
        copy = _resized(copy, {}, _fitting_length(size, work, copy.data.sequence_length, lengths))
        if (model := _working_model(copy, build)) is not None:
            return Fitted(copy, model, parameters, (_note(experiment, config, copy, model),))
    return None


def _config_of(plain: Experiment, build: Any) -> Any:
    with torch.device("meta"):
        return build(plain).config


def _resized(experiment: Experiment, fields: dict[str, Any], length: int | None = None) -> Experiment:
    """With other fields of the model's config, and with a length that its positions follow."""
    from transformers import AutoConfig

    base = AutoConfig.for_model(experiment.model.architecture)
    written = {own_name(base, name): value for name, value in experiment.model.config.items()}
    data = experiment.data
    if length is not None and length != data.sequence_length:
        written.pop(own_name(base, "max_position_embeddings"), None)
        data = data.model_copy(update={"sequence_length": length})
    model = experiment.model.model_copy(update={"config": {**written, **fields}})
    return experiment.model_copy(update={"model": model, "data": data})


def _fitting_length(parameters: int, work: Work, length: int, lengths: Sequence[int]) -> int:
    """The longest that comes down to the work wanted, or the shortest there is."""
    for shorter in lengths:
        if work.is_short(parameters, length):
            break
        length = shorter
    return length


@torch.no_grad()
def _working_model(experiment: Experiment, build: Any) -> nn.Module | None:
    try:
        model: nn.Module = build(experiment)
        model(input_ids=torch.zeros(1, min(LONGEST, experiment.data.sequence_length), dtype=torch.int64))
    except Exception:  # whatever an architecture raises whose sizes do not fit together
        return None
    return model


def _refuse_what_has_no_room(parameters: int, world_size: int, source: str) -> None:
    """Every rank builds the model in float32, and so does this process; an engine needs several times that."""
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    needed = 4 * parameters * (1 + world_size)
    if needed > free:
        raise ConfigError(
            f"its {parameters / 1e9:.1f} billion parameters on {world_size} ranks need more than the "
            f"{free / 2**30:.0f} GiB of memory that are free, and no smaller copy of it works or is wanted",
            source=source,
            key="model",
            fix="--full-size left out, fewer --ranks, or a smaller model.config",
        )


def _shorter_rows(whole: Fitted, build: Any, work: Work, lengths: Sequence[int]) -> Fitted:
    """The whole model on shorter rows: all that is left where its config is not ours to change."""
    own_length = whole.experiment.data.sequence_length
    length = _fitting_length(whole.whole, work, own_length, lengths)
    data = whole.experiment.data.model_copy(update={"sequence_length": length})
    experiment = whole.experiment.model_copy(update={"data": data})
    try:
        model: nn.Module = build(experiment) if length < own_length else whole.model
    except ConfigError:
        return whole  # a factory may insist on its length
    if length == own_length:
        return whole
    owner = "a model.factory keeps its size" if experiment.model.factory else "this architecture keeps its size"
    note = f"shorter rows are verified: {length} of {own_length} tokens; {owner}; --full-size verifies whole rows"
    return Fitted(experiment, model, whole.whole, (note,))


def _note(experiment: Experiment, config: Any, copy: Experiment, model: Any) -> str:
    pairs = {
        "{} of {} layers": (_field(model.config, "num_hidden_layers"), _field(config, "num_hidden_layers")),
        "width {} of {}": (_field(model.config, "hidden_size"), _field(config, "hidden_size")),
        "{} of {} tokens": (copy.data.sequence_length, experiment.data.sequence_length),
    }
    cuts = [text.format(new, old) for text, (new, old) in pairs.items() if new != old]
    weights = ", with random weights" if experiment.model.pretrained else ""
    return f"a shrunk copy is verified: {', '.join(cuts)}{weights}; --full-size verifies the whole model"


def _field(config: Any, name: str) -> Any:
    return getattr(config, name, None)
