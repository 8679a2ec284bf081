"""Decoders that are larger than their budget, trained for real on this CPU with the disk store.

    python bench/big_decoder.py [--cases 124m,1.3b] [--store-dir DIR] [--json FILE]

Each case is `overspill train MODEL --whole-step --optimizer adamw` in a child process. `state` is what parameters,
gradients and AdamW's state take together, `resident` the most physical memory that the child had, Python and torch
included; `seconds` is one step, the last. The disk needs about three times the parameters' bytes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from paired import json_record
from torch._subclasses.fake_tensor import FakeTensorMode

from overspill.core.units import format_bytes
from overspill.models import load


@dataclass(frozen=True)
class Case:
    """A decoder, its budget and how many steps it takes."""

    model: str
    budget: str
    steps: int


CASES = {
    "124m": Case("decoder:width=768,depth=12,heads=12,vocabulary=50257,seq_len=128", "700MiB", 3),
    "1.3b": Case("decoder:width=2048,depth=24,heads=16,vocabulary=50257,seq_len=128", "8GiB", 1),
}
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Row:
    """What one case took."""

    case: str
    model: str
    parameters: int
    state_bytes: int
    budget_bytes: int
    planned_peak_bytes: int
    measured_peak_bytes: int
    resident_bytes: int
    stored_bytes: int
    offloaded_bytes: int
    step_seconds: float
    plan_seconds: float
    losses: tuple[float, ...]

    def line(self) -> str:
        """The row of the table."""
        sizes = (
            self.state_bytes,
            self.budget_bytes,
            self.planned_peak_bytes,
            self.measured_peak_bytes,
            self.resident_bytes,
        )
        return (
            f"{self.case:6s} {self.parameters:14d} "
            + " ".join(f"{format_bytes(nbytes):>10s}" for nbytes in sizes)
            + f" {self.step_seconds:9.1f} {self.plan_seconds:9.1f}"
        )


HEADER = (
    f"{'case':6s} {'parameters':>14s} {'state':>10s} {'budget':>10s} {'planned':>10s} {'measured':>10s} "
    f"{'resident':>10s} {'seconds':>9s} {'planning':>9s}"
)


def parameters_of(model: str) -> int:
    """How many parameters a model has, without memory for them."""
    with FakeTensorMode():
        return sum(p.numel() for p in load(model).module.parameters())


def run(name: str, case: Case, store_dir: str) -> Row:
    """Train one case in a child process."""
    words = [
        "train", case.model, "--batch", "1", "--optimizer", "adamw", "--whole-step", "--budget", case.budget,
        "--steps", str(case.steps), "--store-dir", store_dir, "--json",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "overspill", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: overspill train ended with {done.returncode}")
    answer = json.loads(done.stdout)
    count = parameters_of(case.model)
    return Row(
        name, case.model, count, 4 * FLOAT_BYTES * count, answer["budget_bytes"], answer["planned_peak_bytes"],
        answer["measured_peak_bytes"], 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
        answer["stored_bytes"], answer["offloaded_bytes"], answer["step_seconds"][-1], answer["plan_seconds"],
        tuple(answer["losses"]),
    )  # fmt: skip


def main() -> None:
    """Print the table; save it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--store-dir", default=tempfile.gettempdir())
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    print(HEADER)
    rows = []
    for name in chosen.cases.split(","):  # the smaller first: what a child had at most is that of all before it
        rows.append(run(name, CASES[name], chosen.store_dir))
        print(rows[-1].line(), flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json_record(torch.device("cpu"), rows=[asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
