"""What the live pools do in real steps on the CPU: the share of allocated bytes that they give, and what a step takes.

    python bench/pool_share.py [--models resnet18,gpt2,…] [--batch 16] [--steps 6] [--budget 70%] [--out FILE]
    python bench/pool_share.py --read bench/results/pool_share.json

Small configurations with momentum are trained from each pool, and without one, compiled and as whole steps, on the eager
backend. The share is of the bytes that PyTorch's CPU tensors ask for in the last step, loss and update included. Some
10 CPU seconds a model.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from paired import json_record

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
    run = train(training, Options(budget, store="host", placement=placement))
    found = {
        "model": model, "whole_step": whole_step, "placement": placement, "budget_bytes": run.plan and run.plan.budget_bytes,
        "step_seconds": median(run.step_seconds[2:]),
    }  # fmt: skip
    if run.pool is not None:
        found |= {
            "served_share": run.pool.served_share, "capacity_bytes": run.pool.capacity_bytes,
            "peak_bytes": run.pool.peak_bytes, "planned_share": run.pool.planned_share, "squeezes": run.pool.squeezes,
            "overflows": run.pool.overflows, "restarts": run.pool.restarts,
        }  # fmt: skip
    return found


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
        cells = [f"{format_bytes(r['peak_bytes'])}, {format_seconds(r['step_seconds'])}" for r in pools]
        plain = format_seconds(runs[model, whole, None]["step_seconds"])
        way = "whole step" if whole else "compiled"
        share, room = min(r["served_share"] for r in pools), format_bytes(pools[-1]["capacity_bytes"])
        lines.append(f"| {model} | {way} | {share:.0%} | {room} | {' | '.join(cells)} | {plain} |")
    return "\n".join(lines)


def main() -> None:
    """Train, record, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", default="70%")
    parser.add_argument("--read", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        print(table(json.loads(arguments.read.read_text())))
        return
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    record = partial(json_record, torch.device("cpu"), batch=arguments.batch, budget=arguments.budget, runs=runs)
    for model in arguments.models.split(","):
        for whole in (False, True):
            for placement in (None, *LIVE_PLACEMENTS):
                asked = (model, arguments.batch, arguments.steps, arguments.budget, placement)
                runs.append(trained(*asked, whole_step=whole))
                print(runs[-1], flush=True)
        arguments.out.write_text(record())
    print(table(json.loads(record())))


if __name__ == "__main__":
    main()
