"""Programs as people write them, each trained plainly and under a budget: the same bits, and within it?

    python bench/programs.py [--only NAME ...] [--out bench/results/programs.json]
    python bench/programs.py --read

The programs are in `tests/programs/`. Each is trained in eager PyTorch, then with ever larger budgets until one is not
refused, then with one between that and the plain peak; peaks are bytes of live tensors, counted by a dispatch mode around
the whole program. Of a record that is there already, `--only` replaces the named programs. About 6 minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from paired import json_record

from overspill.core.units import format_bytes
from overspill.planning.effort import VARIABLE

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.programs import PROGRAMS, REFUSED, Outcome, judge  # noqa: E402 - the programs are the tests'

RESULTS = ROOT / "bench" / "results" / "programs.json"


def table(outcomes: Sequence[Outcome]) -> str:
    """One row a program and way, in Markdown, and below them the refusals."""
    rows = ["| program | by | plain peak | budget | peak under it | plans | outcome |", "|---|---|---|---|---|---|---|"]
    for o in outcomes:
        figures = " | ".join(_bytes(n) for n in (o.plain_peak_bytes, o.budget_bytes, o.peak_bytes))
        said = "refused" if o.outcome.startswith(REFUSED) else o.outcome
        rows.append(f"| {o.about} | `{o.way}` | {figures} | {o.plans or '-'} | {said} |")
    refused = [o for o in outcomes if o.outcome.startswith(REFUSED)]
    return "\n".join([*rows, "", *(f"- {o.about}, `{o.way}`: {o.outcome}" for o in refused)])


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes > 1 else "-"


def read(path: Path = RESULTS) -> list[Outcome]:
    """The outcomes of a record."""
    return [Outcome(**row) for row in json.loads(path.read_text())["programs"]]


def main() -> None:
    """Train and record, or print a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.read:
        print(table(read(arguments.out)))
        return
    os.environ.setdefault(VARIABLE, "0.1")  # as the tests, which are of numbers and bytes and not of speed
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch._logging.set_logs(dynamo=logging.ERROR)  # graph breaks are told in the outcome, where they matter
    known = {(o.name, o.way): o for o in read(arguments.out)} if arguments.out.exists() else {}
    cases = [(name, way) for name, found in PROGRAMS.items() for way in found.ways]
    for name, way in cases:
        if name in arguments.only:
            begun = time.perf_counter()
            known[name, way] = judge(PROGRAMS[name], way)
            print(f"{time.perf_counter() - begun:5.1f} s  {table([known[name, way]]).splitlines()[2]}", flush=True)
            outcomes = [asdict(known[case]) for case in cases if case in known]
            arguments.out.write_text(json_record(torch.device("cpu"), programs=outcomes))


if __name__ == "__main__":
    main()
