"""The sides of ``peers.py``: dsaccum, and what people would train with instead. Each is fed the same samples.

Each side is built from equal weights and the same resolved DeepSpeed JSON, and does optimizer steps when asked. The
bare loop and DDP have their micro-batches ready in memory; Accelerate and Trainer read theirs through their own
loaders.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from side_by_side import Setup
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from dsaccum.config.deepspeed import DeepSpeedSettings
from dsaccum.data import WindowStream
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from dsaccum.training.checkpoints.manifest import Counters
from dsaccum.training.control import ControlExchange
from dsaccum.training.loop import TrainingLoop
from dsaccum.training.metrics import MetricsFile
from dsaccum.training.replica_check import ReplicaCheck
from dsaccum.training.stop_request import StopRequest
from dsaccum.training.watchdog import Watchdog

aten = torch.ops.aten


class Side(Protocol):
    """Trains.

    Attributes:
        model: without any wrapper.
    """

    model: nn.Module

    def windows(self, count: int) -> None:
        """So many optimizer steps."""


class Rows(Dataset):
    """The samples of all windows, in the order in which ``WindowStream`` deals them out: micro-step, rank, row."""

    def __init__(self, stream: WindowStream, windows: int, *, mask_first: bool = False) -> None:
        self._samples, self._mask_first = stream.samples, mask_first
        self._ids = [sample for window in range(windows) for sample in stream.order.sample_ids(window)]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, labels = (torch.as_tensor(part).long() for part in self._samples[self._ids[index]])
        if self._mask_first:
            labels = torch.cat([labels.new_full((1,), -100), labels[1:]])
        return {"input_ids": tokens, "labels": labels}


class Ours:
    """``TrainingLoop`` as a run has it: counts and agreement, data, finite check, replica check, metrics."""

    def __init__(self, setup: Setup, settings: DeepSpeedSettings) -> None:
        ranks, batch = setup.ranks, settings.batch
        self.model = setup.model()
        with contextlib.redirect_stdout(io.StringIO()):  # some of DeepSpeed's optimizers print their memory use
            self.engine = WindowEngine(self.model, deepcopy(settings.config), batch, CausalLMLoss())
        metrics = MetricsFile(Path(tempfile.mkdtemp()) / "metrics.jsonl")
        stop = StopRequest()
        self._loop = TrainingLoop(
            engine=self.engine, stream=setup.stream(batch),
            exchange=ControlExchange(ranks.rank, self.engine.device),
            watchdog=Watchdog(ranks, 600, stop).start(), stop=stop, record=metrics.write, note=lambda line: None,
            replicas=ReplicaCheck(self.engine.engine, setup.experiment.run.replica_check_every, ranks.world_size),
        )  # fmt: skip
        self._counters = Counters()

    def windows(self, count: int) -> None:
        self._counters = self._loop.run(self._counters.step + count, max_skipped=1, start=self._counters)


class Bare:
    """What a DeepSpeed tutorial does: forward with labels, backward, step."""

    def __init__(self, setup: Setup, settings: DeepSpeedSettings, total: int) -> None:
        self.model = setup.model()
        parameters = list(self.model.parameters())
        self.engine, *_ = deepspeed.initialize(
            model=self.model, model_parameters=parameters, config=deepcopy(settings.config)
        )
        self._ready = ready_windows(setup, settings, total)

    def windows(self, count: int) -> None:
        for _ in range(count):
            for batch in next(self._ready):
                batch = {name: tensor.to(self.engine.device) for name, tensor in batch.items()}
                loss = self.engine(**batch).loss
                self.engine.backward(loss)
                self.engine.step()


class Ddp:
    """PyTorch alone: DistributedDataParallel with ``no_sync`` off the boundary; a plain loop on one rank."""

    def __init__(self, setup: Setup, settings: DeepSpeedSettings, total: int) -> None:
        config = settings.config
        self.model = setup.model()
        self._device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
        self.model.to(self._device)
        several = setup.ranks.world_size > 1
        self._wrapped = DistributedDataParallel(self.model) if several else self.model
        parameters = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
        self._optimizer = torch.optim.AdamW(self.model.parameters(), **parameters)
        self._schedule = WarmupDecayLR(self._optimizer, **config["scheduler"]["params"])
        self._limit, self._steps = config["gradient_clipping"], settings.batch.accumulation_steps
        self._ready = ready_windows(setup, settings, total)

    def windows(self, count: int) -> None:
        for _ in range(count):
            for index, batch in enumerate(next(self._ready)):
                last = index == self._steps - 1
                batch = {name: tensor.to(self._device) for name, tensor in batch.items()}
                with contextlib.nullcontext() if last or self._wrapped is self.model else self._wrapped.no_sync():
                    (self._wrapped(**batch).loss / self._steps).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self._limit)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()


class WithAccelerate:
    """Accelerate's own DeepSpeed plugin, and its ``accumulate``."""

    def __init__(self, setup: Setup, settings: DeepSpeedSettings, total: int) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

        _own_accelerate_state()
        self._accelerator = Accelerator(
            gradient_accumulation_steps=settings.batch.accumulation_steps,
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepcopy(settings.config)),
        )
        self.model = setup.model()
        optimizer = DummyOptim(list(self.model.parameters()), lr=settings.config["optimizer"]["params"]["lr"])
        rows = Rows(setup.stream(settings.batch), total + 1)
        loader: DataLoader = DataLoader(rows, batch_size=settings.batch.micro_batch)
        self.engine, self._optimizer, self._loader, self._schedule = self._accelerator.prepare(
            self.model, optimizer, loader, DummyScheduler(optimizer)
        )
        assert isinstance(self.engine, DeepSpeedEngine), "Accelerate did not take DeepSpeed"
        self._batches, self._steps = iter(self._loader), settings.batch.accumulation_steps

    def windows(self, count: int) -> None:
        for _ in range(count * self._steps):
            batch = next(self._batches)
            with self._accelerator.accumulate(self.engine):
                loss = self.engine(**batch).loss
                self._accelerator.backward(loss)
                self._optimizer.step()
                self._schedule.step()
                self._optimizer.zero_grad()


class WithTrainer:
    """Hugging Face's Trainer with DeepSpeed. It owns its loop: the others have their turns at the end of its steps.

    For a model whose shift of the labels it does not know (GPT-2) it counts a row's first label as a target, which
    predicts nothing: that label is masked in its rows, so that it divides by what the others divide by.
    """

    def __init__(self, setup: Setup, settings: DeepSpeedSettings, total: int) -> None:
        from transformers import PrinterCallback, Trainer, TrainingArguments

        config, batch = deepcopy(settings.config), settings.batch
        optimizer, schedule = config["optimizer"]["params"], config["scheduler"]["params"]
        self.model = setup.model()
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(), deepspeed=config, max_steps=total,
            per_device_train_batch_size=batch.micro_batch, gradient_accumulation_steps=batch.accumulation_steps,
            learning_rate=optimizer["lr"], adam_beta1=optimizer["betas"][0], adam_beta2=optimizer["betas"][1],
            adam_epsilon=optimizer["eps"], weight_decay=optimizer["weight_decay"],
            warmup_steps=schedule["warmup_num_steps"], max_grad_norm=config["gradient_clipping"],
            train_sampling_strategy="sequential", save_strategy="no", report_to=[], disable_tqdm=True,
            dataloader_pin_memory=False, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        rows = Rows(setup.stream(batch), total + 1, mask_first=True)
        self._trainer = Trainer(self.model, arguments, train_dataset=rows)
        self._trainer.remove_callback(PrinterCallback)

    @property
    def engine(self) -> DeepSpeedEngine:
        return self._trainer.deepspeed

    def drive(self, turns: Iterator[None]) -> None:
        """Train; ``turns`` hands over whenever it is this side's turn for one more step."""
        from transformers import TrainerCallback

        class Between(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                next(turns, None)

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                next(turns, None)

        self._trainer.add_callback(Between())
        self._trainer.train()
        assert isinstance(self.engine, DeepSpeedEngine), "Trainer did not take DeepSpeed"
        assert next(turns, "over") == "over", "Trainer ended before the others"


class Products:
    """The limit: the matrix products of a window's forwards and backwards alone, of the same shapes and types.

    Attention's products are those of its plain definition, whole matrices, which a fused kernel may save in part.
    """

    def __init__(self, setup: Setup, settings: DeepSpeedSettings, dtype: torch.dtype = torch.float32) -> None:
        device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
        self.model = setup.model().to(device, dtype)
        self.model.set_attn_implementation("eager")
        batch = setup.stream(settings.batch).window(0)[0]
        with _ProductRecorder() as recorder:
            self.model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss.backward()
        self._steps = settings.batch.accumulation_steps
        operands: dict[Any, Any] = {}
        self._calls = [(call, *operands.setdefault(key, make())) for call, key, make in recorder.calls]
        self.flops = self._steps * sum(2 * left.numel() * right.size(-1) for _, left, right, _ in self._calls)

    def windows(self, count: int) -> None:
        for _ in range(count * self._steps):
            for call, left, right, out in self._calls:
                call(left, right, out=out)


class _ProductRecorder(TorchDispatchMode):
    """Each matrix product: the function, a key of its operands, and how to make such operands and a result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
            left, right = args[-2:] if len(args) >= 2 else args
            call = torch.mm if packet in (aten.mm, aten.addmm) else torch.bmm
            looks = [(tuple(t.shape), tuple(t.stride()), t.dtype, t.device) for t in (left, right)]
            self.calls.append((call, tuple(looks), lambda: _operands(call, looks)))
        return func(*args, **(kwargs or {}))


def _operands(call: Any, looks: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    left, right = (
        torch.empty_strided(shape, stride, dtype=dtype, device=device).normal_()
        for shape, stride, dtype, device in looks
    )
    return left, right, call(left, right)


def ready_windows(setup: Setup, settings: DeepSpeedSettings, total: int) -> Iterator[list[dict[str, Tensor]]]:
    """All windows of this rank, in memory."""
    stream = setup.stream(settings.batch)
    return iter([stream.window(index) for index in range(total)])


def _own_accelerate_state() -> None:
    """Let the next Accelerator have a state of its own: it is one for the process, and Trainer's has begun.

    Where there is no GPU it is told so, as ``use_cpu`` does for Trainer: Accelerate with DeepSpeed would otherwise know
    of one rank only, and deal all data to each of several.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for kind in (AcceleratorState, GradientState, PartialState):
        kind._shared_state = {}
    PartialState(cpu=not torch.cuda.is_available())
