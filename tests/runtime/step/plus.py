"""A small model whose forward ends as a test wants it, and a step of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import overspill


class Plus(nn.Module):
    """A linear layer, and what `change` does behind it."""

    def __init__(self, change: Callable[[Plus, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.change is None else self.change(self, y)


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn((6, 4), generator=drawn), torch.randint(0, 3, (6,), generator=drawn)


def made(change: Callable[[Plus, Tensor], Tensor] | None = None) -> tuple[Plus, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Plus(change)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any = F.cross_entropy) -> overspill.TrainStep:
    return overspill.train_step(model, loss, optimizer, budget="1MiB", policy="window", store="host")
