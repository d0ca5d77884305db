"""The experiment's model as fake tensors, and its micro-steps for each way of computing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily

from dsaccum.config.errors import ConfigError
from dsaccum.config.experiment import Experiment
from dsaccum.data.tokens import Tokenizer
from dsaccum.loss import SummedLoss, build_loss
from dsaccum.model import build_model
from dsaccum.planning.layers import equal_layers, record_whole
from dsaccum.planning.recorder import record_micro_step
from dsaccum.planning.trace import AffineMicroStep, MicroStep

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FakeRun:
    """A model without storage, and the loss, of one experiment.

    Args:
        experiment: what is trained.
        tokenizer: its own.
        source: its file, for messages.

    Raises:
        ConfigError: the model cannot be built, or its operations depend on values of tensors.
    """

    def __init__(self, experiment: Experiment, tokenizer: Tokenizer, source: str | Path) -> None:
        self._experiment, self._tokenizer, self._source = experiment, tokenizer, source
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._models: dict[bool, nn.Module] = {}
        self._micro_steps: dict[tuple[str, bool], AffineMicroStep] = {}
        self.loss: SummedLoss = build_loss(experiment.loss.factory, source=source)

    @property
    def fields(self) -> int:
        """Tensors of [B, T] in a micro-batch."""
        return 3 if self._experiment.data.packing == "padded" else 2

    @property
    def vocabulary(self) -> int:
        """V: the last dimension of the logits."""
        config = getattr(next(iter(self._models.values())), "config", None)
        return int(getattr(config, "vocab_size", len(self._tokenizer)))

    def model(self, *, checkpointing: bool) -> nn.Module:
        """The model, in fp32."""
        if checkpointing not in self._models:
            config = self._experiment.model.model_copy(update={"activation_checkpointing": checkpointing})
            with self._mode, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._models[checkpointing] = build_model(
                    config,
                    vocabulary_size=len(self._tokenizer),
                    sequence_length=self._experiment.data.sequence_length,
                    seed=0,
                    end_token=self._tokenizer.end_token,
                    pad_token=self._tokenizer.pad_token,
                    source=self._source,
                    weights=False,
                )
        return self._models[checkpointing]

    def micro_step(self, precision: str, *, checkpointing: bool) -> AffineMicroStep:
        """What a micro-step has in memory in this precision (``fp32``, ``bf16``, ``autocast bf16``, ...)."""
        key = (precision, checkpointing)
        if key not in self._micro_steps:
            model = self.model(checkpointing=checkpointing)
            with self._mode:
                self._micro_steps[key] = self._traced(model, precision)
        return self._micro_steps[key]

    def _traced(self, model: nn.Module, precision: str) -> AffineMicroStep:
        try:
            three, two = self._whole(model, precision, 3), self._whole(model, precision, 2)
            if len(three.kind) != len(two.kind):  # the first pass made what the model then keeps, such as a mask
                three = self._whole(model, precision, 3)
            return AffineMicroStep.through(two, three)
        except (DataDependentOutputException, ValueError) as error:
            problem = f"its memory cannot be known without running it ({type(error).__name__}: {error})"
            raise ConfigError(problem, source=self._source, key="model") from error

    def _whole(self, model: nn.Module, precision: str, rows: int) -> MicroStep:
        layers = equal_layers(model)
        step = layers and record_whole(model, layers, lambda: self._record(model, precision, rows))
        return step or self._record(model, precision, rows)

    def _record(self, model: nn.Module, precision: str, rows: int) -> MicroStep:
        length = self._experiment.data.sequence_length
        with unset_fake_temporarily():
            tokens = torch.zeros(rows, length, dtype=torch.long)
            batch = {"input_ids": tokens, "labels": tokens.clone()}
            if self.fields == 3:  # padded: a mask without padding would be a path of its own
                batch["attention_mask"] = torch.ones_like(tokens)
                batch["attention_mask"][:, -1] = 0

        def autocast() -> AbstractContextManager[Any]:
            lower = precision.removeprefix("autocast ")
            return nullcontext() if lower == precision else torch.autocast("cpu", dtype=_DTYPES[lower])

        weights = "fp32" if precision.startswith("autocast") else precision
        with _in_format(model, _DTYPES[weights]):
            return record_micro_step(
                model, self.loss, batch, logits_elements=rows * length * self.vocabulary, autocast=autocast
            )


@contextmanager
def _in_format(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, all floating-point parameters and buffers have this type, as ``model.to(dtype)`` makes them."""
    tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
    before = [(each, each.data) for each in tensors if each.is_floating_point() and each.dtype != dtype]
    for tensor, data in before:
        tensor.data = data.to(dtype)
    try:
        yield
    finally:
        for tensor, data in before:
            tensor.data = data
