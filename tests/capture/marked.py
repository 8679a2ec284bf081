"""A small model whose lines are known by the marks at their ends, and a loop that trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

NAME = Path(__file__).name


def line(mark: str) -> int:
    """The number of the line that ends with `# mark`."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (found,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"  # {mark}"))
    return found


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.pow(3)  # cube

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.square()  # cube backward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))  # block


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)  # first
        x = self.block(x)  # second
        x = Cube.apply(x)  # apply
        return self.tail(x)  # tail


class Again(Net):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # again


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).exp().mean()  # loss


def train(model: nn.Module, steps: int, start: Any = lambda: None) -> None:
    """Training on `cuda`; `start` is told of each step."""
    model.cuda()  # cuda
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        start()
        for _ in range(2):
            loss = loss_of(model, torch.ones(64, 8, device="cuda"))  # input
            loss.backward()  # backward
        optimizer.step()  # step
        optimizer.zero_grad()
