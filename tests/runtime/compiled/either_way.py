"""A small network compiled either way, how it trains, and whether two are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overspill
from overspill.runtime.reachable import same_bits


class Net(nn.Module):
    """Convolution, batch norm, dropouts and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.middle = nn.Linear(8, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        self.drop(x)  # nobody reads it, and eager draws it all the same
        return self.head(torch.relu(self.middle(self.drop(x.mean((2, 3))))))


OPTIONS = {"budget": "1GiB", "policy": "vdnn-all", "store": "host"}
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "overspill.compile": lambda model: overspill.compile(model, budget="1GiB", policy="vdnn-all", store="host"),
    "torch.compile": lambda model: torch.compile(model, backend="overspill", options=dict(OPTIONS), dynamic=False),
}
either_way = pytest.mark.parametrize("compiled_by", WAYS.values(), ids=WAYS.keys())


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))


def train(call: Any, steps: int = 3, seed: int = 7) -> list[float]:
    optimizer = torch.optim.SGD(call.parameters(), lr=0.05, momentum=0.9)
    x, y = batch()
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_gradients(one: nn.Module, other: nn.Module) -> bool:
    return all(same_bits(p.grad, q.grad) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def assert_same(one: nn.Module, other: nn.Module) -> None:
    mine, its = ([*m.parameters(), *m.buffers()] for m in (one, other))
    assert all(map(same_bits, mine, its))
    assert len(mine) == len(its)
