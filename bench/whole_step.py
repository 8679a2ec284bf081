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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from paired import json_record
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.core import Graph
from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_bytes
from overspill.devices import load_device
from overspill.job import Job
from overspill.models import load, optimizer_named
from overspill.models.step import TrainingStep
from overspill.planning.order import feature_maps_alone
from overspill.plans.plan import make_plan, unmanaged_peak
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.session import Session
from overspill.runtime.options import Options
from overspill.runtime.preview import step_graph
from overspill.runtime.tracker import LiveBytes

SIMULATED = (("gpt2", 4), ("resnet50", 32), ("bert-base", 8), ("vgg16-vdnn", 32))
GPUS = ("rtx4090", "a100-80gb", "h200", "cpu")
SHARES = (0.75, 0.6, 0.5, 0.33)


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

    @property
    def ratio(self) -> float | None:
        """How many times as long the step takes with feature maps alone."""
        if self.whole_seconds is None or self.feature_maps_seconds is None:
            return None
        return self.feature_maps_seconds / self.whole_seconds

    def line(self) -> str:
        """The row of the table."""
        cells = [_seconds(s) for s in (self.in_core_seconds, self.whole_seconds, self.feature_maps_seconds)]
        return (
            f"{self.model:12s} {self.batch:5d} {self.gpu:10s} {self.share:6.0%} {format_bytes(self.budget_bytes):>10s} "
            + " ".join(f"{cell:>12s}" for cell in cells)
            + f" {'' if self.ratio is None else f'{self.ratio:.3f}':>7s}"
        )


HEADER = (
    f"{'model':12s} {'batch':>5s} {'gpu':10s} {'share':>6s} {'budget':>10s} {'in core':>12s} {'whole step':>12s} "
    f"{'feature maps':>12s} {'ratio':>7s}   (simulated seconds)"
)


def _seconds(value: float | None) -> str:
    return "infeasible" if value is None else f"{value:.4f}"


def simulated(models: Sequence[tuple[str, int]], gpus: Sequence[str]) -> Iterator[Simulated]:
    """The rows of the simulated table."""
    for model, batch in models:
        graph = step_graph(Job(partial(load, model), batch, "adamw"), whole_step=True)
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
JOBS = (("gpt2", 1, 128),)
"""Built-in model, batch and sequence length; all with AdamW."""
BUDGETS = (0.95, 0.35)
"""Budgets as shares of what the step takes unmanaged: one that feature maps alone can meet, and one that they cannot."""
STEPS = 5


class Way:
    """One way to train a job; `step` takes one step and returns its loss."""

    def __init__(self, name: str, module: nn.Module, budget_bytes: int | None = None) -> None:
        self.name = name
        self.module = module
        self.budget_bytes = budget_bytes
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.tracker = LiveBytes(torch.device("cpu"))
        self.step: Callable[[], Tensor]

    def timed(self) -> None:
        """One step on the clock."""
        torch.manual_seed(len(self.losses))  # the same dropout in all ways
        begun = time.perf_counter()
        self.losses.append(self.step().item())
        self.seconds.append(time.perf_counter() - begun)


def ways(name: str, batch: int, seq_len: int, store_dir: str) -> Iterator[Way]:
    """The ways to train one job, each with a model of its own from the same weights."""
    torch.manual_seed(0)
    job = load(name, seq_len=seq_len)
    inputs = job.make_batch(batch)
    whole = Job(partial(load, name, seq_len=seq_len), batch, "adamw")
    peak = unmanaged_peak(step_graph(whole, whole_step=True), load_device("cpu"))

    def own() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = copy.deepcopy(job.module)
        return module, optimizer_named("adamw")(module.parameters())

    def eager(way: Way, module: nn.Module, optimizer: torch.optim.Optimizer) -> Way:
        def step() -> Tensor:
            with way.tracker:
                optimizer.zero_grad(set_to_none=True)
                loss = job.loss(module, *inputs)
                loss.backward()
                optimizer.step()
            return loss.detach()

        way.tracker.add([*module.parameters(), *module.buffers(), *inputs])
        way.step = step
        return way

    module, optimizer = own()
    yield eager(Way("plain", module), module, optimizer)
    module, optimizer = own()
    for block in module.blocks:
        block.forward = _checkpointed(block.forward)
    yield eager(Way("torch checkpoint", module), module, optimizer)
    for share in BUDGETS:
        budget = int(share * peak)
        module, optimizer = own()
        try:
            yield _compiled(module, optimizer, job, inputs, budget, store_dir)
        except InfeasibleBudget:
            print(f"overspill.compile: {format_bytes(budget)} is not feasible with feature maps alone", file=sys.stderr)
        module, optimizer = own()
        way = Way("overspill.train_step", module, budget)
        planned = overspill.train_step(module, job.loss, optimizer, budget=budget, store="disk", store_dir=store_dir)
        planned.tracker = way.tracker
        way.step = partial(planned, *inputs)
        yield way


def _checkpointed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def _compiled(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    job: Any,
    inputs: tuple[Tensor, ...],
    budget: int,
    store_dir: str,
) -> Way:
    way = Way("overspill.compile", module, budget)
    step_module = TrainingStep(replace(job, module=module))
    session = Session(Options(budget=budget, store="disk", store_dir=store_dir))
    session.watch(step_module, optimizer)
    session.tracker = way.tracker
    call = compile_in(session, step_module, fullgraph=True)
    way.tracker.add([*module.parameters(), *module.buffers(), *inputs])

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = call(*inputs)
        with way.tracker:
            loss.backward()
            optimizer.step()
        return loss.detach()

    way.step = step
    way.timed()  # an infeasible budget shows here
    way.seconds.clear()
    return way


def measured(steps: int) -> Iterator[Measured]:
    """The rows of the measured table; the ways take their steps in turn, the first of each (compilation) not counted."""
    for name, batch, seq_len in JOBS:
        with tempfile.TemporaryDirectory() as folder:
            found = list(ways(name, batch, seq_len, folder))
            for way in found:
                if not way.losses:
                    way.timed()
                    way.seconds.clear()
            for _ in range(steps):
                for way in found:
                    way.timed()
            plain = statistics.median(found[0].seconds)
            assert all(way.losses == found[0].losses for way in found if way.name != "torch checkpoint")
            for way in found:
                step = statistics.median(way.seconds)
                yield Measured(
                    f"{name} batch {batch} x {seq_len}", way.name, way.budget_bytes, step, tuple(way.seconds),
                    way.tracker.peak_bytes, step / plain,
                )  # fmt: skip


def main() -> None:
    """Print the table; save it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="measure on this machine")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--models", help="simulate only these, separated by commas")
    parser.add_argument("--gpus", help="simulate only for these, separated by commas")
    parser.add_argument("--json", type=Path, help="save the rows there")
    parser.add_argument("--read", type=Path, help="print saved rows again")
    chosen = parser.parse_args()
    if chosen.read is not None:
        saved = json.loads(chosen.read.read_text())
        kind: Any = Measured if saved["measured"] else Simulated
        report([kind(**row) for row in saved["rows"]])
        return
    models = [m for m in SIMULATED if chosen.models is None or m[0] in chosen.models.split(",")]
    gpus = GPUS if chosen.gpus is None else tuple(chosen.gpus.split(","))
    rows: Iterator[Any] = measured(chosen.steps) if chosen.run else simulated(models, gpus)
    kept = report(rows)
    if chosen.json is not None:
        saved = [asdict(row) for row in kept]
        chosen.json.write_text(json_record(torch.device("cpu"), measured=chosen.run, rows=saved))


def report(rows: Any) -> list[Any]:
    """Print the rows as they come, and what they say together."""
    kept: list[Any] = []
    for row in rows:
        if not kept:
            print(HEADER if isinstance(row, Simulated) else MEASURED_HEADER)
        kept.append(row)
        print(row.line(), flush=True)
    rows_of_both = [r for r in kept if isinstance(r, Simulated)]
    ratios = [r.ratio for r in rows_of_both if r.ratio is not None]
    if ratios:
        alone = sum(1 for r in rows_of_both if r.whole_seconds and not r.feature_maps_seconds)
        print(
            f"\nslower than feature maps alone in {sum(r < 1 - 1e-9 for r in ratios)} of {len(ratios)}; "
            f"geometric mean {statistics.geometric_mean(ratios):.3f} times as fast; feasible only over all tensors: {alone}"
        )
    return kept


if __name__ == "__main__":
    main()
