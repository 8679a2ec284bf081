"""What tests of the virtual GPU share: a small model, its batch, and a few steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

F = torch.nn.functional
optim = torch.optim
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch() -> Tensor:
    return torch.randn(4, 8, device="cuda")


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()
