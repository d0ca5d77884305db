"""Small training cases: a tiny GPT, random samples, and the same run through dsaccum and through plain PyTorch.

The plain side shares nothing with the product but the samples and the order: its own loss, its own counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from dsaccum.batch import EffectiveBatch
from dsaccum.data import Samples, WindowOrder, WindowStream
from dsaccum.engine.process import Ranks
from dsaccum.engine.window_engine import WindowEngine
from dsaccum.loss import CausalLMLoss
from dsaccum.training.control import ControlExchange
from dsaccum.training.loop import TrainingLoop
from dsaccum.training.metrics import StepMetrics
from dsaccum.training.stop_request import StopRequest

VOCABULARY, LENGTH = 50, 16
PEAK_RATE, BETAS, EPS, WEIGHT_DECAY = 3e-3, (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True)
class Case:
    """One run. ``padded`` gives rows of 2 to 16 tokens, i.e. 1 to 15 targets each."""

    world_size: int = 1
    accumulation_steps: int = 1
    micro_batch: int = 16
    stage: int = 0
    padded: bool = False
    last_window: str = "continue"
    num_samples: int = 100
    steps: int = 20
    clipping: float = 1.0
    precision: dict[str, Any] = field(default_factory=dict)
    max_skipped: int = 3

    @property
    def batch(self) -> EffectiveBatch:
        return EffectiveBatch(self.world_size, self.accumulation_steps, self.micro_batch)

    @property
    def config(self) -> dict[str, Any]:
        adamw = {"lr": PEAK_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "torch_adam": True}
        warmup = {"warmup_min_lr": 1e-4, "warmup_max_lr": PEAK_RATE, "warmup_num_steps": 5, "warmup_type": "linear"}
        return {
            "train_batch_size": self.batch.total,
            "gradient_accumulation_steps": self.accumulation_steps,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_clipping": self.clipping,
            "optimizer": {"type": "AdamW", "params": adamw},
            "scheduler": {"type": "WarmupLR", "params": warmup},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 20000,
                "allgather_bucket_size": 20000,
                "stage3_param_persistence_threshold": 100,
            },
            **self.precision,
        }


@dataclass
class Result:
    """What a run left: its metrics, and its parameters at the end (empty at ZeRO 3)."""

    metrics: list[StepMetrics]
    parameters: dict[str, Tensor]
    notes: list[str]
    scheduler_steps: int


def tiny_gpt() -> nn.Module:
    torch.manual_seed(1)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )
    ).train()  # fmt: skip


def random_samples(count: int, *, padded: bool) -> Samples:
    random = np.random.default_rng(0)
    lengths = random.integers(2, LENGTH + 1, count) if padded else np.full(count, LENGTH)
    prompts = random.integers(0, lengths - 1) if padded else np.zeros(count, np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    tokens = random.integers(2, VOCABULARY, int(lengths.sum())).astype(np.uint8)
    return Samples(
        tokens=tokens, starts=starts, lengths=lengths, prompt_lengths=prompts, sequence_length=LENGTH, padded=padded,
        dropped_tokens=0,
    )  # fmt: skip


class StillDog:
    """A watchdog that watches nothing."""

    def at(self, step: int, micro_step: int, phase: str) -> None:
        pass


def stream_of(case: Case, ranks: Ranks) -> WindowStream:
    samples = random_samples(case.num_samples, padded=case.padded)
    order = WindowOrder(case.num_samples, case.batch.total, case.last_window, seed=0)
    return WindowStream(samples, order, case.batch, ranks.rank, pad_token=0)


def run_dsaccum(ranks: Ranks, case: Case, model: nn.Module | None = None, loss: CausalLMLoss | None = None) -> Result:
    """Train the case through DeepSpeed with the product's own loop."""
    engine = WindowEngine(model or tiny_gpt(), case.config, case.batch, loss or CausalLMLoss())
    metrics: list[StepMetrics] = []
    notes: list[str] = []
    loop = TrainingLoop(
        engine=engine,
        stream=stream_of(case, ranks),
        exchange=ControlExchange(ranks.rank, engine.device),
        watchdog=StillDog(),
        stop=StopRequest(),
        record=metrics.append,
        note=notes.append,
    )
    loop.run(case.steps, case.max_skipped)
    scheduler_steps = engine.engine.lr_scheduler.last_batch_iteration + 1
    state = engine.full_state_dict() or {}
    result = Result(metrics, {name: tensor.clone() for name, tensor in state.items()}, notes, scheduler_steps)
    engine.engine.destroy()
    return result


def big_batch(case: Case, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """The window's E rows in one batch: input ids, mask, next-token targets (-100 = none); no product code."""
    samples = random_samples(case.num_samples, padded=case.padded)
    order = WindowOrder(case.num_samples, case.batch.total, case.last_window, seed=0)
    ids, mask, targets = (torch.full((case.batch.total, LENGTH), fill) for fill in (0, 0, -100))
    for row, sample in enumerate(order.sample_ids(window)):
        if sample < 0:
            continue
        start, length, prompt = samples.starts[sample], samples.lengths[sample], samples.prompt_lengths[sample]
        tokens = torch.from_numpy(samples.tokens[start : start + length].astype(np.int64))
        ids[row, :length], mask[row, :length] = tokens, 1
        first = max(prompt, 1)  # the token at position t is predicted at t - 1; the first is predicted by nothing
        targets[row, first - 1 : length - 1] = tokens[first:]
    mask[:, 0] = 1
    return ids, mask, targets


def big_batch_loss(model: nn.Module, case: Case, window: int) -> Tensor:
    ids, mask, targets = big_batch(case, window)
    logits = model(input_ids=ids, attention_mask=mask).logits
    return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=-100)


def run_plain(case: Case) -> list[float]:
    """The same run in plain PyTorch, one big batch a step; returns the losses."""
    model = tiny_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    losses = []
    for step in range(case.steps):
        # WarmupLR, linear over 5 steps from 1e-4: DeepSpeed sets the rate of update 1 at its start, i.e. twice.
        progress = min(1.0, max(0, step - 1) / 5)
        optimizer.param_groups[0]["lr"] = 1e-4 + (PEAK_RATE - 1e-4) * progress if step > 0 else 1e-4
        optimizer.zero_grad()
        loss = big_batch_loss(model, case, step)
        loss.backward()
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        optimizer.step()
        losses.append(loss.item())
    return losses
