"""One budget for everything against plans of feature maps alone, and against PyTorch's own ways, on the CPU device.

    python bench/whole_step.py                          simulated: every model, GPU and budget of the table
    python bench/whole_step.py --run                    measured on this machine, in turns
    python bench/whole_step.py --read FILE              print a saved run again

Simulated rows: the step of `auto` over all tensors of the step (parameters, gradients and optimizer state too), and of
`auto` where only feature maps and other tensors of forward and backward may move, both on the same graph, at the same
budget: a share of what the step takes unmanaged. `ratio` is the latter's step over the former's.

Measured rows: one job by plain PyTorch, by `torch.utils.checkpoint` on its blocks, by `overspill.compile`, which moves
feature maps, and by `overspill.train_step`, each a step in turn in one process; `ratio` is over plain PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from paired import machine
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.core import Graph, TensorKind
from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_bytes
from overspill.devices import load_device
from overspill.models import load, optimizer_named
from overspill.policies.planning import make_plan, unmanaged_peak
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.training import Training, whole_step_graph

SIMULATED = (("gpt2", 4), ("resnet50", 32), ("bert-base", 8), ("vgg16", 32))
GPUS = ("rtx4090", "a100-80gb", "h200", "cpu")
SHARES = (0.75, 0.6, 0.5, 0.33)
FEATURE_MAPS = frozenset({TensorKind.ACTIVATION, TensorKind.TEMPORARY, TensorKind.OUTPUT_GRADIENT})


@dataclass(frozen=True)
class Simulated:
    """One budget: seconds of the step in core, planned over all tensors, and over feature maps alone (None: infeasible)."""

    model: str
    batch: int
    gpu: str
    share: float
    budget_bytes: int
    in_core_seconds: float
    whole_seconds: float | None
    feature_maps_seconds: float | None

    def line(self) -> str:
        """The row of the table."""
        ratio = self.feature_maps_seconds / self.whole_seconds if self.whole_seconds and self.feature_maps_seconds else None
        cells = [_seconds(s) for s in (self.in_core_seconds, self.whole_seconds, self.feature_maps_seconds)]
        return (
            f"{self.model:12s} {self.batch:5d} {self.gpu:10s} {self.share:6.0%} {format_bytes(self.budget_bytes):>10s} "
            + " ".join(f"{cell:>12s}" for cell in cells)
            + f" {'' if ratio is None else f'{ratio:.3f}':>7s}"
        )


HEADER = (
    f"{'model':12s} {'batch':>5s} {'gpu':10s} {'share':>6s} {'budget':>10s} {'in core':>12s} {'whole step':>12s} "
    f"{'feature maps':>12s} {'ratio':>7s}   (simulated seconds)"
)


def _seconds(value: float | None) -> str:
    return "infeasible" if value is None else f"{value:.4f}"


def feature_maps_alone(graph: Graph) -> Graph:
    """The same step where parameters, gradients and optimizer state stay, and updates come at the end."""
    tensors = (replace(t, movable=t.movable and t.kind in FEATURE_MAPS) for t in graph.tensors)
    return replace(graph, tensors=tuple(tensors), whole_step=False)


def simulated(models: Sequence[tuple[str, int]], gpus: Sequence[str]) -> Iterator[Simulated]:
    """The rows of the simulated table."""
    for model, batch in models:
        graph = whole_step_graph(Training(lambda model=model: load(model), batch, "adamw"))
        for gpu in gpus:
            device = load_device(gpu)
            peak = unmanaged_peak(graph, device)
            for share in SHARES:
                budget = int(share * peak)
                plans = [_planned(g, device, budget) for g in (graph, feature_maps_alone(graph))]
                in_core = make_plan(graph, device, "liveness", 2 * peak).step_seconds
                yield Simulated(model, batch, gpu, share, budget, in_core, *plans)


def _planned(graph: Graph, device: Any, budget: int) -> float | None:
    try:
        return make_plan(graph, device, "auto", budget).step_seconds
    except InfeasibleBudget:
        return None


# -- measured


@dataclass(frozen=True)
class Measured:
    """One way to train one job: its step, the median of `steps` in turns, and the most bytes that were live."""

    job: str
    way: str
    budget_bytes: int | None
    step_seconds: float
    steps_seconds: tuple[float, ...]
    peak_bytes: int
    ratio: float

    def line(self) -> str:
        """The row of the table."""
        budget = "" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        return (
            f"{self.job:24s} {self.way:18s} {budget:>10s} {format_bytes(self.peak_bytes):>10s} "
            f"{self.step_seconds:10.3f} {self.ratio:7.3f}"
        )


MEASURED_HEADER = (
    f"{'job':24s} {'way':18s} {'budget':>10s} {'peak':>10s} {'step':>10s} {'ratio':>7s}   (measured seconds)"
)
JOBS = (("gpt2", 1, 128), ("gpt2", 4, 128))
