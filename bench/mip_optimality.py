"""How far the heuristics are from the optimum that the integer program proves, on inference and training steps.

    python bench/mip_optimality.py [--models alexnet,googlenet,…] [--time-limit SECONDS] [--json FILE]

The profile-guided placement paper (§5) has CPLEX prove its heuristic optimal for the inference of AlexNet and
GoogLeNet. Here HiGHS solves the same equations on the blocks that a forward pass makes, each dead after its last use,
and on those of a training step. A line gives the blocks, the most live bytes, and the peaks of the paper's heuristic,
of the default solver and of the program, with what the program proves. Where a heuristic meets the live bytes the
program is solved before it starts. Models are the small configurations, whose blocks are as many as the full ones'.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import TypedDict

from overspill import models
from overspill.core import Block, Graph, Phase, Trace
from overspill.core.errors import RequestError
from overspill.devices import load_device
from overspill.placement.packing import Limits, solver_named
from overspill.plans.plan import make_plan
from overspill.runtime.training import Training, step_graph
from overspill.simulate import trace_of

MODELS = "alexnet,googlenet,vgg16-vdnn,resnet18,resnet50,unet,inception-v3,densenet121"
NO_LIMIT_BYTES = 1 << 60


class Line(TypedDict):
    """One trace; peaks and bounds in bytes, CPU seconds of the program's solver."""

    model: str
    step: str
    blocks: int
    live_bytes: int
    skyline_bytes: int
    portfolio_bytes: int
    mip_bytes: int | None
    proven_bytes: int | None
    seconds: float | None


def inference_trace(graph: Graph) -> Trace:
    """The blocks of a forward pass that keeps nothing for backward: parameters stay, the rest goes after its last use."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    blocks = [(0, len(forward), t.nbytes, t.name) for t in graph.tensors if t.persistent]
    for tensor in graph.tensors:
        uses = [op.id for op in forward if tensor.id in op.reads or tensor.id in op.writes]
        if uses and not tensor.persistent:
            blocks.append((uses[0], uses[-1] + 1, tensor.nbytes, tensor.name))
    blocks += [
        (op.id, op.id + 1, op.workspace_bytes, f"workspace of {op.name}") for op in forward if op.workspace_bytes
    ]
    return Trace(tuple(Block(i, *block) for i, block in enumerate(sorted(blocks))))


def measured(model: str, step: str, trace: Trace, limits: Limits) -> Line:
    """The line of one trace."""
    peaks = {}
    for name in ("skyline", "portfolio"):
        layout = solver_named(name).solve(trace, limits).layout
        assert layout is not None
        peaks[name] = layout.peak_bytes
    line: Line = {
        "model": model, "step": step, "blocks": len(trace.blocks), "live_bytes": trace.lower_bound_bytes,
        "skyline_bytes": peaks["skyline"], "portfolio_bytes": peaks["portfolio"],
        "mip_bytes": None, "proven_bytes": None, "seconds": None,
    }  # fmt: skip
    begun = time.process_time()
    try:
        found = solver_named("mip").solve(trace, limits)
    except RequestError:  # too many pairs for it
        return line
    if found.layout is not None:
        line |= {"mip_bytes": found.layout.peak_bytes, "proven_bytes": found.bound_bytes}
    line["seconds"] = time.process_time() - begun
    return line


def spell(line: Line) -> str:
    """The line as the table has it: peaks as shares of what is proven."""
    proven = line["proven_bytes"] or line["live_bytes"]
    over = [f"{100 * (peak / proven - 1):8.3f}" for peak in (line["skyline_bytes"], line["portfolio_bytes"])]
    mip = "       -" if line["mip_bytes"] is None else f"{100 * (line['mip_bytes'] / proven - 1):8.3f}"
    best = min(peak for peak in (line["portfolio_bytes"], line["mip_bytes"] or line["portfolio_bytes"]))
    verdict = "optimal" if best <= proven else "open"
    return (
        f"{line['model']:14} {line['step']:9} {line['blocks']:6} {line['live_bytes']:12} {'  '.join(over)} {mip} "
        f"{line['seconds'] or 0.0:8.2f} s  {verdict}"
    )


def main() -> None:
    """Print a line for each model and step, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    limits = Limits(time_limit_seconds=arguments.time_limit)
    device = load_device("titan-x")
    print(f"{'model':14} {'step':9} {'blocks':>6} {'live bytes':>12} above what is proven, in %: skyline portfolio mip")
    lines = []
    for name in arguments.models.split(","):
        graph = step_graph(Training(partial(models.load, name, small=True), 8))
        training = make_plan(graph, device, "liveness", NO_LIMIT_BYTES)
        for step, trace in (("inference", inference_trace(graph)), ("training", trace_of(graph, training.schedule))):
            lines.append(measured(name, step, trace, limits))
            print(spell(lines[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"time_limit_seconds": arguments.time_limit, "lines": lines}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
