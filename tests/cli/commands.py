"""What a command left behind, and the models that the tests give it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODELS = """
import torch
from torch import nn


class Raising(nn.Linear):
    def forward(self, x):
        raise ValueError("no such luck\\nand more")


class Broken(nn.Linear):
    def forward(self, x):
        print("a graph break")
        return super().forward(x)


def deep():
    layers = [m for _ in range(8) for m in (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), lambda batch: torch.randn(batch, 64)


def shallow():
    layers = [m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers), lambda batch: torch.randn(batch, 64)


def talkative():
    print("hello from the user's own callable")
    return deep()


def raises():
    raise KeyError("nothing\\nhere")


def forward_alone():
    return nn.Linear(8, 8)


def forward_raises():
    return Raising(8, 8)


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(9, 2)

    def forward(self, x):
        return self.head(self.body(x))


def wrong_size():
    return Narrow(), lambda batch: torch.randn(batch, 8)


def breaks():
    return Broken(8, 8)


def reads_too_far():
    return nn.Embedding(4, 4), lambda batch: torch.full((batch, 2), 7)


def runs_out_of_memory():
    raise MemoryError


def diverges():
    return nn.Linear(4, 4), lambda batch: torch.full((batch, 4), float("nan"))


class Lined(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return torch.tanh(x)


def lined():
    return Lined(64, 64), lambda batch: torch.randn(batch, 64)


class ByValues(nn.Linear):
    def forward(self, x):
        rows = (super().forward(x)[:, 0] > 0).nonzero()
        return x[rows] if rows.numel() else x


def by_values():
    return ByValues(4, 4), lambda batch: torch.randn(batch, 4)


def detached():
    return nn.Linear(4, 4), lambda batch: torch.randn(batch, 4), lambda output, x: output.detach().mean()
"""


@dataclass(frozen=True)
class Done:
    """What a command left: its exit code and its two outputs."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    @property
    def error(self) -> str:
        """The one line that says what went wrong, after what may tell of progress."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.endswith(lines[0] + "\n")
        assert "Traceback" not in self.err + self.out
        return lines[0]


Overspill = Callable[..., Done]
