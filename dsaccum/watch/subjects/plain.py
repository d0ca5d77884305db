"""An optimizer of torch and a module, under DDP or not: the boundary is ``optimizer.step``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dsaccum.instruments.gradients import Snapshot
from dsaccum.instruments.replicas import checksum
from dsaccum.watch.fsdp import whole


class PlainAdapter:
    """Reads gradients, parameters and states where torch keeps them.

    Args:
        module: the user's, without DDP around it.
        optimizer: that steps it.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer
        self.parameters = dict(module.named_parameters())
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}

    @property
    def stepped(self) -> dict[str, nn.Parameter]:
        """Parameters that the optimizer has."""
        return {
            self.names[id(p)]: p
            for group in self.optimizer.param_groups
            for p in group["params"]
            if id(p) in self.names
        }

    def gradients(self) -> dict[str, Tensor | None]:
        """As they are now."""
        return {
            name: None if p.grad is None else dense(whole(p.grad.detach())).to("cpu", copy=True)
            for name, p in self.stepped.items()
            if p.requires_grad
        }

    def snapshot(self) -> Snapshot:
        """Parameters, states and options at this moment."""
        stepped = self.stepped
        options = {
            self.names[id(p)]: {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
            for p in group["params"]
            if id(p) in self.names
        }
        return Snapshot(
            {name: _copy(p) for name, p in self.parameters.items()},
            {name: _copy(p) for name, p in stepped.items() if p.requires_grad},
            {
                name: {key: _copy(value) for key, value in self.optimizer.state.get(p, {}).items()
                       if isinstance(value, Tensor | int | float)}
                for name, p in stepped.items()
            },
            options,
        )  # fmt: skip

    def values(self) -> dict[str, Tensor]:
        """Every parameter, where it lies."""
        return {name: whole(p.detach()) for name, p in self.parameters.items()}

    def checksums(self) -> dict[str, int]:
        """Of every parameter; none where no rank has them whole."""
        if any(hasattr(p, "full_tensor") for p in self.parameters.values()):
            return {}
        return {name: checksum(p) for name, p in self.parameters.items()}


def dense(gradient: Tensor) -> Tensor:
    """An embedding's may be sparse."""
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _copy(tensor: Any) -> Tensor:
    return torch.as_tensor(whole(tensor)).detach().to("cpu", copy=True)
