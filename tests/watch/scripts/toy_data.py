"""What all scripts of this folder train on: a small model, and rows of random tokens with or without padding."""

from __future__ import annotations

import contextlib

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 64, 16


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LENGTH, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Rows(Dataset):
    """Random tokens; ragged rows are padded with 0 on the right."""

    def __init__(self, count: int = 128, *, ragged: bool = False, mask_padding: bool = True) -> None:
        draw = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=draw)
        lengths = torch.randint(2, LENGTH + 1, (count,), generator=draw) if ragged else torch.full((count,), LENGTH)
        self.mask = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
        self.tokens = torch.where(self.mask == 1, self.tokens, 0)
        self.labels = torch.where(self.mask == 1, self.tokens, -100) if mask_padding else self.tokens.clone()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.tokens[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }


def save(module: torch.nn.Module, path: str) -> None:
    """So that a test can compare a watched run with an unwatched one: each rank's parameters, those of ZeRO 3 whole."""
    import torch.distributed as dist

    if not path:
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    named = dict(module.named_parameters())
    with whole(list(named.values())):
        torch.save({name: p.detach().clone() for name, p in named.items()}, f"{path}.{rank}" if rank else path)


def whole(parameters: list[torch.nn.Parameter]) -> contextlib.AbstractContextManager[object]:
    """Inside, ZeRO 3's parameters are gathered."""
    if not any(hasattr(p, "ds_id") for p in parameters):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def never_compile() -> None:
    """Keep DeepSpeed from compiling an operation that it never uses here (a minute, and a compiler)."""
    import deepspeed

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


class LoraLinear(torch.nn.Module):
    """A frozen linear layer with a small trained one beside it."""

    def __init__(self, base: torch.nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))

    @classmethod
    def put_into(cls, model: torch.nn.Module) -> None:
        """Freeze a model, and put one beside every query and value projection."""
        torch.manual_seed(3)
        model.requires_grad_(False)
        for part in list(model.modules()):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear) and name in ("q_proj", "v_proj"):
                    setattr(part, name, cls(child))
