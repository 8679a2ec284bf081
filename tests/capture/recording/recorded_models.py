"""Small models whose training is recorded, and the size of their batches."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor, nn

from overspill.capture.recording.recording import Allocation, Recording
from overspill.core import TensorKind

F = torch.nn.functional
BATCH = 16
# The host's scalars, such as the step numbers of optimizers, are smaller than any tensor of these programs.
SMALLEST = 64


class Residual(nn.Module):
    """Branches that meet, in forward and in the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(torch.relu(self.first(x)))
        return x * torch.sigmoid(x) + torch.tanh(x)


class Meeting(nn.Module):
    """Three gradients of one tensor meet where nothing else is as large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).unsqueeze(-1).expand(-1, -1, 50).clone()
        return (x * 1.0).sum(1) + (x * 2.0).sum(1) + (x * 3.0).sum(1)


class Transposed(nn.Module):
    """Linear layers on inputs that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x.view(BATCH, 8, 8).transpose(0, 1))
        return self.outer(torch.tanh(x).transpose(0, 1))


class Selecting(nn.Module):
    """Gathering and maxima, whose gradients go into zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(64, 256), nn.Linear(64, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).view(BATCH, 4, 64).max(1).values
        return self.out(x).gather(1, torch.zeros(BATCH, 20, dtype=torch.int64, device=x.device))


class Twice(nn.Module):
    """One layer used twice, and a weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.last.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.inner(torch.relu(self.inner(x)))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 32))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


def most_live(allocations: Iterable[Allocation]) -> int:
    """The most bytes of these that live at once."""
    changes = sorted(change for a in allocations for change in ((a.start, a.nbytes), (a.end, -a.nbytes)))
    return max(accumulate(nbytes for _, nbytes in changes), default=0)


def most(recording: Recording, kind: TensorKind) -> int:
    """The same of all of a kind."""
    return most_live(a for a in recording.allocations if a.kind is kind)
