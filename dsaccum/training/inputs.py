"""All that the user gave, read and checked before anything is started or written."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from dsaccum.config.deepspeed import DeepSpeedSettings, load_deepspeed_config
from dsaccum.config.experiment import Experiment
from dsaccum.config.loading import load_experiment, overrides_named
from dsaccum.data import Data, WindowOrder, load_data
from dsaccum.engine.process import Ranks
from dsaccum.engine.schema import installed_schema
from dsaccum.loss import SummedLoss, build_loss
from dsaccum.model import build_model
from dsaccum.probe import check_causal_language_model
from dsaccum.training.arguments import TrainArguments
from dsaccum.training.checkpoints.manifest import StreamOrigin
from dsaccum.training.start import Start, find_start


@dataclass(frozen=True)
class Inputs:
    """All that the user gave, read and checked."""

    arguments: TrainArguments
    experiment: Experiment
    deepspeed: DeepSpeedSettings
    data: Data
    order: WindowOrder
    model: nn.Module
    parameters: dict[str, int]
    """Counted before DeepSpeed has it: at ZeRO 3 a partitioned parameter says that it is empty."""
    loss: SummedLoss
    start: Start
    """As rank 0 found it; the other ranks learn of it when they have joined."""

    def window_order(self, origin: StreamOrigin, total: int | None = None) -> WindowOrder:
        """Which samples each window holds, where the stream was entered at this origin; of another E, if given."""
        return WindowOrder(
            len(self.data.samples),
            total or self.deepspeed.batch.total,
            self.experiment.data.last_window,
            self.experiment.data.seed,
            self.arguments.experiment,
            first_window=origin.window,
            position=origin.position,
        )


def read_inputs(arguments: TrainArguments, ranks: Ranks) -> Inputs:
    """Read both files, the data and the model. Changes nothing on disk.

    Raises:
        ConfigError: whatever the user can mend.
    """
    with overrides_named(arguments.overrides):
        return _read(arguments, ranks)


def _read(arguments: TrainArguments, ranks: Ranks) -> Inputs:
    experiment = load_experiment(arguments.experiment, arguments.overrides)
    deepspeed = load_deepspeed_config(
        arguments.deepspeed,
        schema=installed_schema(),
        experiment=experiment,
        world_size=ranks.world_size,
        accumulation_steps=arguments.accumulation_steps,
        micro_batch=arguments.micro_batch,
        may_be_automatic=True,
    )
    start = find_start(arguments.resume, arguments.output_directory) if ranks.is_first else Start()
    source = arguments.experiment
    loss = build_loss(experiment.loss.factory, source=source)
    data = load_data(experiment.data, source)
    order = WindowOrder(
        len(data.samples), deepspeed.batch.total, experiment.data.last_window, experiment.data.seed, source
    )
    model = build_model(
        experiment.model,
        vocabulary_size=len(data.tokenizer),
        sequence_length=experiment.data.sequence_length,
        seed=experiment.run.seed,
        end_token=data.tokenizer.end_token,
        pad_token=data.tokenizer.pad_token,
        source=source,
    )
    if experiment.loss.factory is None:
        check_causal_language_model(model, len(data.tokenizer), experiment.data.sequence_length, source)
    return Inputs(arguments, experiment, deepspeed, data, order, model, _parameter_count(model), loss, start)


def _parameter_count(module: nn.Module) -> dict[str, int]:
    """All parameters and the trained ones; tied weights count once."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return {"total": sum(size for size, _ in sizes), "trained": sum(size for size, trained in sizes if trained)}
