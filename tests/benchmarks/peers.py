"""dsaccum against what people would train with instead: the same model, data, precision and E, in turns, in one run.

Run: python tests/benchmarks/peers.py [--ranks 2] [--rounds 20] [--windows 2] [--config ds_configs/accum4.json]
     python tests/benchmarks/peers.py --precision bf16     # ours in the shipped bf16 config against ours in fp32

Sides: a bare DeepSpeed loop, Hugging Face's Trainer with DeepSpeed, Accelerate with DeepSpeed, PyTorch's DDP with
``no_sync`` (on one rank a plain loop), and the limit: the matrix products alone. All live in one process per rank and
do ``--windows`` optimizer steps in turn; each round has an order of its own. Ratios are (their seconds) / (ours), in
pairs of a round, with a 95 % bootstrap interval. That all do the same work is checked: tokens seen, parameters after
the first window, loss on the same held-out batch after the last. fp32, ZeRO 0 to 2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from side_by_side import CONFIGS, EXPERIMENT, Setup, Turns, on_ranks, paired, set_up, show, tell

BF16 = CONFIGS / "bf16_accum4.json"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--windows", type=int, default=2, help="optimizer steps in a turn")
    parser.add_argument("--config", type=Path, default=CONFIGS / "accum4.json")
    parser.add_argument("--experiment", type=Path, default=EXPERIMENT)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--precision", choices=["bf16"], help="compare the shipped bf16 config with fp32, ours both")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    on_ranks(arguments.ranks)
    total = 1 + (1 + arguments.rounds) * arguments.windows
    setup = set_up([*arguments.set, f"run.steps={total}"], arguments.experiment)
    compare_precisions(setup, arguments) if arguments.precision else compare_peers(setup, arguments, total)


def compare_peers(setup: Setup, arguments: argparse.Namespace, total: int) -> None:
    from sides import Bare, Ddp, Ours, Products, WithAccelerate, WithTrainer

    settings = setup.settings(arguments.config)
    # Trainer first: its arguments reset the state that Accelerate keeps for the process.
    trainer = WithTrainer(setup, settings, total)
    sides: dict[str, Any] = {
        "dsaccum": Ours(setup, settings),
        "bare DeepSpeed": Bare(setup, settings, total),
        "Trainer": trainer,
        "Accelerate": WithAccelerate(setup, settings, total),
        "DDP" if setup.ranks.world_size > 1 else "plain PyTorch": Ddp(setup, settings, total),
    }
    work = EqualWork(setup, {name: side.model for name, side in sides.items()})
    products = Products(setup, settings)
    turns = Turns({name: None if side is trainer else side.windows for name, side in sides.items()}
                  | {"matrix products": products.windows})  # fmt: skip
    trainer.drive(turns.take(arguments.windows, arguments.rounds, after_first=work.first))
    for name, side in sides.items():
        if engine := getattr(side, "engine", None):
            steps = getattr(engine, "engine", engine).global_steps
            assert steps == total, f"{name}: {steps} of {total} optimizer steps went through DeepSpeed"
    equal = work.last()
    if setup.ranks.is_first:
        report(setup, settings.batch, turns, arguments, {"flops_of_products": products.flops, "equal_work": equal})


def compare_precisions(setup: Setup, arguments: argparse.Namespace) -> None:
    import torch
    from sides import Ours, Products

    full, half = setup.settings(arguments.config), setup.settings(BF16)
    if full.batch != half.batch:
        sys.exit(f"{arguments.config.name} and {BF16.name} split E differently")
    turns = Turns({
        "dsaccum": Ours(setup, full).windows, "dsaccum, bf16": Ours(setup, half).windows,
        "matrix products": Products(setup, full).windows,
        "matrix products, bf16": Products(setup, half, torch.bfloat16).windows,
    })  # fmt: skip
    turns.play(arguments.windows, arguments.rounds)
    if setup.ranks.is_first:
        pairs = {"speed_up": paired(turns.seconds["dsaccum"], turns.seconds["dsaccum, bf16"])}
        pairs["speed_up_of_products"] = paired(turns.seconds["matrix products"], turns.seconds["matrix products, bf16"])
        for name, figures in pairs.items():
            print(f"{name}: {figures['ratio']} ({figures['interval_95'][0]} to {figures['interval_95'][1]})")
        report(setup, full.batch, turns, arguments, pairs)


class EqualWork:
    """Whether the sides do the same: tokens, parameters after one window, loss of one batch at the end."""

    def __init__(self, setup: Setup, models: dict[str, Any]) -> None:
        self._setup, self._models = setup, models
        self._tokens: Counter[str] = Counter()
        self._start = _flat(models["dsaccum"])
        self._found: dict[str, Any] = {}
        for name, model in models.items():
            model.register_forward_pre_hook(self._counter(name), with_kwargs=True)

    def _counter(self, name: str) -> Any:
        def count(_module: Any, _arguments: Any, keywords: dict[str, Any]) -> None:
            self._tokens[name] += keywords["input_ids"].numel()

        return count

    def first(self) -> None:
        ours = _flat(self._models["dsaccum"])
        change = (ours - self._start).norm()
        apart = {name: float((_flat(model) - ours).norm() / change) for name, model in self._models.items()}
        self._found["parameters_apart_after_1_window"] = _beside_ours(apart)
        del self._start

    def last(self) -> dict[str, Any]:
        """What was found; the tokens are this rank's.

        Raises:
            AssertionError: a side did more or less than the others.
        """
        assert len(set(self._tokens.values())) == 1, f"tokens: {dict(self._tokens)}"
        tokens = self._tokens["dsaccum"]
        losses = {name: self._held_out_loss(model) for name, model in self._models.items()}
        worst = max(self._found["parameters_apart_after_1_window"].values())
        assert worst < 0.05, f"the first window's updates differ: {self._found}"
        apart = {name: abs(loss / losses["dsaccum"] - 1) for name, loss in losses.items()}
        return {**self._found, "tokens_on_a_rank": tokens, "loss_apart_at_the_end": _beside_ours(apart)}

    def _held_out_loss(self, model: Any) -> float:
        import torch

        from dsaccum.data.stream import collate

        batch = collate(self._setup.data.held_out, range(8), self._setup.data.tokenizer.pad_token)
        device = next(model.parameters()).device
        with torch.no_grad():
            return float(model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss)


def _flat(model: Any) -> Any:
    import torch

    return torch.cat([parameter.detach().double().flatten().cpu() for parameter in model.parameters()])


def _beside_ours(apart: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.2g}") for name, value in apart.items() if name != "dsaccum"}


def report(setup: Setup, batch: Any, turns: Turns, arguments: argparse.Namespace, more: dict[str, Any]) -> None:
    tokens = batch.total * setup.experiment.data.sequence_length
    ours = turns.seconds["dsaccum"]
    figures = {
        name: {"seconds": round(statistics.median(seconds), 5),
               "tokens_per_second": round(tokens / statistics.median(seconds)), **paired(seconds, ours)}
        for name, seconds in turns.seconds.items()
    }  # fmt: skip
    show(
        f"W = {batch.world_size}, N = {batch.accumulation_steps}, B = {batch.micro_batch}, E = {batch.total}, "
        f"{tokens:,} tokens, {setup.threads} threads a rank; {arguments.rounds} rounds of {arguments.windows} steps",
        ["side", "seconds per step", "tokens / s", "theirs / ours", "95 %"],
        [[name, each["seconds"], each["tokens_per_second"], each["ratio"], "{} to {}".format(*each["interval_95"])]
         for name, each in figures.items()],
    )  # fmt: skip
    tell({
        "benchmark": "peers", "config": arguments.config.name, "experiment": setup.experiment.name,
        "world_size": batch.world_size, "accumulation_steps": batch.accumulation_steps,
        "micro_batch": batch.micro_batch, "rounds": arguments.rounds, "windows": arguments.windows,
        "threads": setup.threads, "sides": figures, **more,
    })  # fmt: skip


if __name__ == "__main__":
    main()
