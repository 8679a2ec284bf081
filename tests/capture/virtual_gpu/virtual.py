"""What tests of the virtual GPU share: a small model, its batch, a few steps, and work in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from overspill.capture.virtual_gpu.record import record
from overspill.core.errors import OverspillError

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


def refused_in_another_thread(work: Callable[[], Any]) -> OverspillError:
    """The error with which `work` ends in a thread of its own that a recorded program starts."""
    found: list[OverspillError] = []

    def other() -> None:
        try:
            work()
        except OverspillError as error:
            found.append(error)

    def program(_: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    record(program)
    return found[0]
