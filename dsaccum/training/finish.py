"""What a run leaves behind: held-out loss, the model in transformers' own format, and a text sampled from it."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsaccum.data.samples import NOT_A_TARGET
from dsaccum.data.stream import held_out_batches

if TYPE_CHECKING:
    from dsaccum.batch import EffectiveBatch
    from dsaccum.data.samples import Samples
    from dsaccum.data.tokens import Tokenizer
    from dsaccum.engine.window_engine import WindowEngine

HELD_OUT_SAMPLES = 128
LAST_STEPS = 10


def held_out_loss(
    engine: WindowEngine, samples: Samples, pad_token: int, rank: int, progress: Callable[[], None]
) -> float:
    """Mean over the target tokens of (at most ``HELD_OUT_SAMPLES`` of) the held-out split. A collective."""
    batch = engine.batch
    batches = held_out_batches(samples, batch.micro_batch, rank, batch.world_size, HELD_OUT_SAMPLES, pad_token)
    loss_sum, count = engine.evaluate(batches, progress)
    totals = torch.stack([loss_sum, torch.tensor(float(count), dtype=torch.float64, device=loss_sum.device)])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def save_model(module: nn.Module, state: dict[str, Tensor], tokenizer: Tokenizer, directory: Path) -> None:
    """Write weights (safetensors, tied ones once), config and tokenizer; ``from_pretrained(directory)`` loads them.

    Written aside and then renamed, so that ``directory`` holds a whole model or doesn't exist. The model of a run that
    was continued past its end is replaced, and what one that was ended while it saved has left.
    """
    draft = directory.with_name(directory.name + ".partial")
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir()
    try:
        _write_weights(module, state, draft)
        tokenizer.save(draft)
        if directory.exists():
            shutil.rmtree(directory)
        draft.rename(directory)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _write_weights(module: nn.Module, state: dict[str, Tensor], directory: Path) -> None:
    for config in (getattr(module, "config", None), getattr(module, "generation_config", None)):
        if config is not None and getattr(config, "use_cache", None) is False:
            config.use_cache = True  # off while training only, where nothing is generated
    save_pretrained = getattr(module, "save_pretrained", None)
    if callable(save_pretrained):
        save_pretrained(directory, state_dict=state)
    else:
        from safetensors.torch import save_file

        save_file({name: tensor.clone() for name, tensor in state.items()}, directory / "model.safetensors")


def sample_text(directory: Path, prompt: list[int], tokenizer: Tokenizer, sequence_length: int) -> str | None:
    """Load the saved model as a user would, and let it go on from ``prompt`` up to ``sequence_length`` tokens.

    None for models of a factory, which transformers cannot load.
    """
    from transformers import AutoModelForCausalLM

    if not (directory / "config.json").exists():
        return None
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    torch.manual_seed(0)
    tokens = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=sequence_length - len(prompt),
        do_sample=True,
        temperature=0.5,
        top_k=40,
        use_cache=True,
        pad_token_id=tokenizer.pad_token,
    )
    return tokenizer.decode(tokens[0, len(prompt) :].tolist())


def choose_prompt(samples: Samples, sequence_length: int) -> list[int]:
    """The beginning of a held-out sample: the masked prompt where it has one, otherwise the first tokens.

    At most half of ``sequence_length``, so that something can follow within the model's positions.
    """
    input_ids, labels = samples[0]
    masked = int((labels != NOT_A_TARGET).argmax())
    length = masked if masked > 0 else sequence_length // 2
    return list(map(int, input_ids[: max(1, min(length, sequence_length // 2))]))


@dataclass(frozen=True)
class Figures:
    """The last figures of a run.

    Attributes:
        losses: of the applied steps, in order.
        held_out: mean over the held-out target tokens; None where it isn't finite (a record holds no NaN).
        tokens_per_second: target tokens of all ranks, over the whole training time.
    """

    losses: list[float]
    held_out: float
    tokens_per_second: float

    @property
    def last_loss(self) -> float | None:
        """Mean over the last ``LAST_STEPS`` applied steps."""
        window = self.losses[-LAST_STEPS:]
        return sum(window) / len(window) if window else None

    def record(self) -> dict[str, float | None]:
        """For ``run.json``."""
        return {
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.last_loss,
            "held_out_loss": self.held_out if math.isfinite(self.held_out) else None,
            "tokens_per_second": self.tokens_per_second,
        }

    def lines(self) -> list[str]:
        """For people."""
        if self.last_loss is None:
            return ["loss            no step was applied"]
        steps = min(LAST_STEPS, len(self.losses))
        last = f"{self.last_loss:.4f} over the last {steps} step{'' if steps == 1 else 's'}"
        return [
            f"loss            {self.losses[0]:.4f} at the start, {last}",
            f"held-out loss   {self.held_out:.4f}",
            f"speed           {self.tokens_per_second:,.0f} tokens/s",
        ]


def sample_lines(directory: Path, held_out: Samples, tokenizer: Tokenizer, sequence_length: int) -> list[str]:
    """A sampled text behind its prompt, set off from the other lines. The run is over: nothing here may fail it."""
    prompt = choose_prompt(held_out, sequence_length)
    try:
        text = sample_text(directory, prompt, tokenizer, sequence_length)
    except Exception as error:
        return [f"sample          none: {type(error).__name__}: {' '.join(str(error).split())}"]
    if text is None:
        return []
    bar = "-" * 80
    quoted = f"{_printable(tokenizer.decode(prompt))}|>{_printable(text)}"
    return ["sample          after a held-out prompt, marked |>", bar, quoted, bar]


def _printable(text: str) -> str:
    """Control characters as escapes: a sampled byte must not steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def next_command(command: Sequence[str], batch: EffectiveBatch) -> str:
    """The same run at the same effective batch in half the activation memory; a finer split is the same update.

    Args:
        command: the flags that this run was given.
        batch: how its effective batch was split.
    """
    flags = _without(command, "--accum-steps", "--micro-batch", "--output-dir", "--resume")
    steps, rows = 2 * batch.accumulation_steps, batch.micro_batch // 2
    split = ["--accum-steps", str(steps), "--micro-batch", str(rows)] if batch.micro_batch % 2 == 0 else []
    other = [] if split or "--experiment" in flags else ["--experiment", "launch/experiments/llama-nano.yaml"]
    return f"{_launcher(batch)} launch/train.py {shlex.join([*flags, *split, *other])}"


def continue_command(command: Sequence[str], batch: EffectiveBatch, directory: Path) -> str:
    """The command that continues a run.

    Args:
        command: the flags that it was given.
        batch: how its effective batch was split.
        directory: of the run.
    """
    flags = _without(command, "--output-dir", "--resume", "--new-effective-batch")
    return f"{_launcher(batch)} launch/train.py {shlex.join([*flags, '--resume', str(directory)])}"


def _launcher(batch: EffectiveBatch) -> str:
    return "deepspeed" if batch.world_size == 1 else f"deepspeed --num_gpus {batch.world_size}"


def _without(command: Sequence[str], *unwanted: str) -> list[str]:
    """The flags but these and their values, and what a launcher added."""
    kept, skip = [], False
    for flag in command:
        name = flag.partition("=")[0]
        if not skip and name not in (*unwanted, "--local_rank"):
            kept.append(flag)
        skip = not skip and name in unwanted and name != "--new-effective-batch" and "=" not in flag
    return kept
