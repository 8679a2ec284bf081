"""What the recipes 09 to 11 and 16 share: data, the peak of live bytes, and whether runs have the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import Dataset

from overspill.core.units import format_bytes, parse_bytes
from overspill.runtime.reachable import same_bits
from overspill.runtime.tracker import LiveBytes


class Samples(Dataset):
    """Labelled vectors that are made when they are asked for, as a data set on disk is read: none stays in memory."""

    def __init__(self, count: int, seed: int = 1) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        vector = torch.randn(128, generator=torch.Generator().manual_seed(10_000 * self.seed + index))
        return vector, index % 10


@contextmanager
def measured(budgeted: Any) -> Iterator[LiveBytes]:
    """Count the bytes of all tensors that live while this lasts; `budgeted` is what overspill.compile gave, or None."""
    live = LiveBytes(torch.device("cpu"))
    if budgeted is None:
        with live:
            yield live
        return
    # A compiled model must not be called in the mode that counts: its graphs count for themselves.
    budgeted.overspill.tracker = live
    make: Callable[[], Callable[..., Any]] = budgeted._make

    def make_uncounted() -> Callable[..., Any]:
        call = make()

        def uncounted(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return call(*args, **kwargs)

        return uncounted

    budgeted._make = make_uncounted
    with live:
        yield live


@dataclass
class Run:
    """What one run gave: its losses, its final weights and buffers by their names, and its peak of live bytes."""

    losses: list[float]
    state: dict[str, Tensor]
    peak_bytes: int


def same(one: Run, other: Run) -> bool:
    """Whether two runs have the same losses and weights to the last bit."""
    return one.losses == other.losses and _same(one.state, other.state)


def report(budget: str | int, plain: Run, budgeted: Run, resumed: Run, saved: dict[str, Tensor]) -> None:
    """Print the peaks, and whether losses and weights are those of the plain run to the last bit."""
    print(f"plain peak {format_bytes(plain.peak_bytes)}")
    print(
        f"budgeted peak {format_bytes(budgeted.peak_bytes)} within {format_bytes(parse_bytes(budget))}: {_within(budget, budgeted, resumed)}"
    )
    print(f"losses identical: {plain.losses == budgeted.losses}")
    print(f"weights identical: {_same(plain.state, budgeted.state)}")
    print(f"resumed from a checkpoint, identical: {same(plain, resumed)}")
    print(f"its file loaded in a plain model, identical: {_same(plain.state, saved)}")


def _within(budget: str | int, *runs: Run) -> bool:
    return all(run.peak_bytes <= parse_bytes(budget) for run in runs)


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(same_bits(value, other[name]) for name, value in one.items())
