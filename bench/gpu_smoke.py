"""ResNet-50 and the decoder on this machine's GPU under three budgets, against plain training, as JSON.

    python bench/gpu_smoke.py [--batch-resnet 128] [--batch-gpt2 8] [--pairs 5] [--out FILE]

For each job and budget: losses equal or not, planned peak, measured peak (allocated and reserved), step times of both
sides, and how long the compute stream waited for transfers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from paired import Case, compare, json_record

from overspill.core.errors import InfeasibleBudget
from overspill.models import load
from overspill.runtime.options import Options
from overspill.runtime.training import Training, train

BUDGETS = ("0.75", "0.5", "0.4")


def measure(case: Case, budget: str, pairs: int) -> dict[str, Any]:
    """All figures of one job under one budget."""
    device = torch.device("cuda")
    options = Options(budget=budget)
    row: dict[str, Any] = {"model": case.model, "batch": case.batch, "budget": budget}
    try:
        timed = compare(case, options, device, pairs, warmup=2)
    except InfeasibleBudget as refusal:
        return row | {"feasible": False, "floor_bytes": refusal.floor_bytes, "cause": refusal.cause}
    row |= timed.summary()
    # Peaks are taken in a run of its own, without the plain copy beside it.
    torch.cuda.empty_cache()
    run = train(Training(lambda: load(case.model, seq_len=case.seq_len), case.batch, device="cuda"), options)
    row["measured_allocated_bytes"] = run.measured_peak_bytes
    row["measured_reserved_bytes"] = run.reserved_peak_bytes
    plain = sorted(timed.plain_seconds)[len(timed.plain_seconds) // 2]
    managed = sorted(timed.managed_seconds)[len(timed.managed_seconds) // 2]
    row["measured_exposed_seconds"] = managed - plain
    return row


def main() -> None:
    """Run all cases, or say that there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-resnet", type=int, default=128)
    parser.add_argument("--batch-gpt2", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_smoke: this machine has no CUDA device")
    cases = [Case("resnet50", arguments.batch_resnet), Case("gpt2", arguments.batch_gpt2, seq_len=512)]
    rows = [measure(case, budget, arguments.pairs) for case in cases for budget in BUDGETS]
    record = json_record(torch.device("cuda"), rows=rows)
    print(record, end="")
    if arguments.out:
        arguments.out.write_text(record)


if __name__ == "__main__":
    main()
