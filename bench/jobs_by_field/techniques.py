"""Ways to train that go with any model: branches, norms, teachers, checkpoints, functions of one's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .job import job
from .ways import Steps, Way


class Branches(nn.Module):
    """Takes one of two layers by what its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.above, self.below = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(x).relu() if x.mean() > 0 else self.below(x).relu()


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that needs no labels."""
    return model(x).square().mean()


@job("a branch on the mean of the input, which alternates")
def branch(way: Way) -> Steps:
    return way.train(Branches(), mean_square, [torch.randn(64, 32) + shift for shift in (1, -1, 1, -1)])


class Routed(nn.Module):
    """Rows go to experts, in a loop with nonzero()."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            made = made.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return made


@job("mixture of experts: a loop with nonzero()")
def experts_loop(way: Way) -> Steps:
    return way.train(Routed(), mean_square, [torch.randn(64, 32) for _ in range(3)])


class Rotated(nn.Module):
    """Pairs of features turned by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("turns", torch.polar(torch.ones(16, 16), torch.randn(16, 16)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.into(x).unflatten(-1, (16, 2)))
        return self.out(torch.view_as_real(pairs * self.turns).flatten(-2))


@job("rotary embedding by complex numbers")
def rope_complex(way: Way) -> Steps:
    return way.train(Rotated(), mean_square, [torch.randn(4, 16, 32) for _ in range(3)])
