"""What the live pools do in real steps on the CPU: the share of allocated bytes that they give, and what a step takes.

    python bench/pool_share.py [--models resnet18,gpt2,…] [--batch 16] [--steps 6] [--budget 90%] [--out FILE]
    python bench/pool_share.py --read bench/results/pool_share.json

Small configurations with momentum are trained from each pool, and without one, compiled and as whole steps, on the eager
backend. The share is of the bytes that PyTorch's CPU tensors ask for in the last step, loss and update included. Some
10 CPU seconds a model.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from by_model import run_by_model

from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_bytes, format_seconds
from overspill.models import load
from overspill.runtime.live.need import LIVE_PLACEMENTS
from overspill.runtime.options import Options
from overspill.runtime.training import Training, train

RESULTS = Path(__file__).parent / "results" / "pool_share.json"
MODELS = "alexnet,vgg16,resnet18,unet,lstm,seq2seq-varied,gpt2"


def trained(
    model: str, batch: int, steps: int, budget: str, placement: str | None, *, whole_step: bool
) -> dict[str, Any]:
    """One run, and what became of its pool."""
    torch._dynamo.reset()
    training = Training(
        partial(load, model, small=True), batch, "momentum", steps, whole_step=whole_step, keep_state=False
    )
    found: dict[str, Any] = {"model": model, "whole_step": whole_step, "placement": placement}
    try:
        run = train(training, Options(budget, store="host", placement=placement))
    except InfeasibleBudget as refusal:
        return found | {"feasible": False, "floor_bytes": refusal.floor_bytes}
    found |= {
        "budget_bytes": run.plan and run.plan.budget_bytes,
        "step_seconds": median(run.step_seconds[2:]),
    }  # fmt: skip
    if run.pool is not None:
        found |= {
            "served_share": run.pool.served_share, "capacity_bytes": run.pool.capacity_bytes,
            "peak_bytes": run.pool.peak_bytes, "planned_share": run.pool.planned_share, "squeezes": run.pool.squeezes,
            "overflows": run.pool.overflows, "restarts": run.pool.restarts,
        }  # fmt: skip
    return found


def all_ways(model: str, asked: Namespace) -> Iterator[dict[str, Any]]:
    """Compiled and as a whole step, from each pool and without one."""
    for whole in (False, True):
        for placement in (None, *LIVE_PLACEMENTS):
            yield trained(model, asked.batch, asked.steps, asked.budget, placement, whole_step=whole)


def table(record: dict[str, Any]) -> str:
    """Markdown: a line for each model and way to train it; of each pool its peak and the time of a step."""
    lines = [
        f"Small configurations at batch {record['batch']}, momentum, budget {record['budget']}, eager backend:",
        "",
        f"| model | | bytes from the pool | the pool may hold | {' | '.join(f'`{p}`' for p in LIVE_PLACEMENTS)} | step without a pool |",
        f"|---|---|---|---|{'---|' * len(LIVE_PLACEMENTS)}---|",
    ]
    runs = {(r["model"], r["whole_step"], r["placement"]): r for r in record["runs"]}
    for model, whole in dict.fromkeys((r["model"], r["whole_step"]) for r in record["runs"]):
        pools = [runs[model, whole, placement] for placement in LIVE_PLACEMENTS]
        cells = [
            f"{format_bytes(r['peak_bytes'])}, {format_seconds(r['step_seconds'])}" if "peak_bytes" in r else "refused"
            for r in pools
        ]
        plain = runs[model, whole, None].get("step_seconds")
        way = "whole step" if whole else "compiled"
        share = min((r["served_share"] for r in pools if "served_share" in r), default=None)
        room = max((r["capacity_bytes"] for r in pools if "capacity_bytes" in r), default=None)
        served = "" if share is None else f"{share:.0%}"
        size = "" if room is None else format_bytes(room)
        lines.append(
            f"| {model} | {way} | {served} | {size} | {' | '.join(cells)} | {'refused' if plain is None else format_seconds(plain)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train, record, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", default="90%")
    run_by_model(parser, MODELS, RESULTS, all_ways, table, slice(4, None), "batch", "budget", rows="runs")


if __name__ == "__main__":
    main()
