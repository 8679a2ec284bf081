"""The jobs that people bring, each trained plainly and under a budget by four ways in: which have the same bits?

    python bench/jobs.py [--jobs NAME,…] [--ways NAME,…] [--processes 2] [--json FILE]
    python bench/jobs.py --list
    python bench/jobs.py --device cuda --processes 0 [--jobs NAME,…] [--json FILE]
    python bench/jobs.py --first-step [--rounds 3] [--jobs NAME,…] [--json FILE]
    python bench/jobs.py --read bench/results/jobs.json

The jobs are in `jobs_by_field/`, three or four steps each. By `compile` and `train_step` a job is compared with plain
PyTorch, with Inductor's kernels with stock torch.compile: losses, gradients (those of a planned step live inside it),
parameters, buffers, optimizer state and the generator, after every step; and on the CPU, with eager kernels, the measured
peak of each with the budget. Each runs in a process of its own, on one thread.
A process that ends, or that gives no answer in time, is a crash. Of a record that is there, what was not run stays.
Libraries that some need: `make jobs-libraries`. Some hours for all, most of it in C++ compilers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
from job_first_steps import SIDES, Row, first_step
from job_first_steps import table as first_step_table
from job_processes import each
from job_trials import CRASH, IDENTICAL, KINDS, NOT_INSTALLED, Outcome, judge, row
from jobs_by_field import JOBS
from jobs_by_field.job import Job
from jobs_by_field.known import KNOWN
from jobs_by_field.ways import WAYS
from paired import json_record

from overspill.core.units import format_bytes
from overspill.planning.effort import VARIABLE

Case = tuple[Job, str]
LIBRARIES = ("transformers", "peft", "timm", "diffusers", "torch_geometric", "monai", "torchvision")


def main() -> None:
    """Run jobs, or print a record."""
    options = _options()
    if options.read is not None:
        print_record(options.read)
        return
    if options.list:
        print(*(f"{job.name:28s} {job.field:15s} {job.about}" for job in JOBS.values()), sep="\n")
        return
    warnings.simplefilter("ignore")
    os.environ.setdefault(VARIABLE, "0.1")  # the bits are asked for, not the best of plans
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    cases = [(JOBS[name], way) for name in options.jobs for way in options.ways]
    _load(job for job, _ in cases)
    if options.first_step:
        time_first_steps([JOBS[name] for name in options.jobs if JOBS[name].deep], options)
        return
    found = {(o.job, o.way): o for o in read(options.json)} if options.json and options.json.exists() else {}
    ran: list[Outcome] = []
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout
    for outcome in outcomes(cases, options):
        ran.append(replace(outcome, revision=revision.strip()))
        print(f"{len(ran):3d}/{len(cases)} {outcome.seconds:5.1f} s  {told(outcome)}", flush=True)
        if options.json:
            found[outcome.job, outcome.way] = ran[-1]
            rows = [row(found[name, way]) for name in JOBS for way in WAYS if (name, way) in found]
            record(options.json, options.device, jobs=rows)
    print(summary(ran))


def outcomes(cases: Sequence[Case], options: argparse.Namespace) -> Iterator[Outcome]:
    """The outcome of each case, as they come."""
    for job, way in cases:
        if job.missing:
            yield Outcome.of(job, way, NOT_INSTALLED, ", ".join(job.missing))
    there = [case for case in cases if not case[0].missing]
    if not options.processes:
        for job, way in there:
            yield judge(job, way, options.device)
        return
    for (job, way), found in each(there, judge, options.processes, options.seconds, loud=options.verbose):
        yield Outcome.of(job, way, CRASH, found) if isinstance(found, str) else found


def time_first_steps(jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Time the first steps of jobs at real depth, one process after the other, and record them."""
    cases = [
        (job, side)
        for job in jobs
        for _ in range(options.rounds)
        for side in SIDES
        if side in options.ways or side not in WAYS
    ]
    there = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    asked = {(job.name, side) for job, side in cases}
    kept = [row for row in there.get("first_steps", []) if (row["job"], row["side"]) not in asked]
    rows: list[Row] = []
    for (job, side), found in each(cases, first_step, 1, 2 * options.seconds, loud=options.verbose):
        rows.append(
            {"job": job.name, "layers": job.deep, "side": side}
            | ({"error": found} if isinstance(found, str) else found)
        )
        print(f"{len(rows):3d}/{len(cases)} {rows[-1]}", flush=True)
        if options.json:
            record(options.json, "cpu", first_steps=kept + rows)
    print(first_step_table(kept + rows))


def record(path: Path, device: str, **rows: Any) -> None:
    """Write `rows`, found on `device`; those of the other kind that are there stay."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept = {name: kept[name] for name in ("jobs", "first_steps") if name in kept}
    path.write_text(json_record(torch.device(device), libraries=_versions(), **kept | rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), metavar="NAME,…")
    parser.add_argument("--ways", default=",".join(WAYS), metavar="NAME,…")
    parser.add_argument("--processes", type=int, default=1, help="so many at once; 0: in this process, one by one")
    parser.add_argument("--seconds", type=float, default=300.0, help="a job that takes longer is a crash")
    parser.add_argument(
        "--first-step", action="store_true", help="time first steps of eight jobs at real depth instead"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda; times of first steps are the CPU's")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side's first step is timed")
    parser.add_argument("--verbose", action="store_true", help="with all that the jobs print, and tracebacks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record to write, or to add to")
    parser.add_argument("--read", type=Path, metavar="FILE", help="print the tables of a record, and run nothing")
    parser.add_argument("--list", action="store_true", help="print the names of all jobs, and run nothing")
    options = parser.parse_args()
    for asked, known in (("jobs", JOBS), ("ways", WAYS)):
        names = getattr(options, asked).split(",")
        if unknown := [name for name in names if name not in known]:
            parser.error(f"--{asked}: no {unknown[0]}; there are {', '.join(known)}")
        setattr(options, asked, names)
    if options.device != "cpu" and options.processes:
        parser.error(f"--device {options.device} needs --processes 0: forked processes cannot use CUDA")
    return options


def _load(jobs: Iterable[Job]) -> None:
    """Import what the jobs need, before processes begin that each would."""
    for job in {job.name: job for job in jobs}.values():
        if not job.missing:
            job.load()


def _versions() -> dict[str, str]:
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: found[name] for name in LIBRARIES if name in found}


def read(path: Path) -> list[Outcome]:
    """The outcomes of a record."""
    return [Outcome(**found) for found in json.loads(path.read_text()).get("jobs", [])]


def print_record(path: Path) -> None:
    """Print the tables of what a record has."""
    print(table(read(path)))
    if first_steps := json.loads(path.read_text()).get("first_steps"):
        print(f"\n{first_step_table(first_steps)}")


def told(outcome: Outcome) -> str:
    """One line on an outcome."""
    vain = f" ({outcome.named_in_vain} budgets named in vain)" if outcome.named_in_vain else ""
    vain += f" ({format_bytes(outcome.over_bytes)} over the budget)" if outcome.over_bytes else ""
    said = f": {outcome.error} {outcome.said}".replace(":  ", ": ") if outcome.said else ""
    return f"{outcome.job:26s} {outcome.way:20s} {outcome.kind}{vain}{said}"


def summary(found: Sequence[Outcome]) -> str:
    """How many of each kind there are, in Markdown: a row a way."""
    rows = [f"| way in | {' | '.join(KINDS)} |", f"|---{'|---' * len(KINDS)}|"]
    for way in WAYS:
        kinds = Counter(o.kind for o in found if o.way == way)
        if kinds:
            rows.append(f"| `{way}` | {' | '.join(str(kinds[kind]) for kind in KINDS)} |")
    return "\n".join(rows)


def table(found: Sequence[Outcome]) -> str:
    """The counts, a row a job, and below what was said of those that are not identical, in Markdown."""
    kinds = {(o.job, o.way): o.kind for o in found}
    rows = [f"| field | job | {' | '.join(f'`{way}`' for way in WAYS)} |", f"|---|---{'|---' * len(WAYS)}|"]
    for name, (field, about) in {o.job: (o.field, o.about) for o in found}.items():
        cells = " | ".join(kinds.get((name, way), "not run") for way in WAYS)
        rows.append(f"| {field} | `{name}`: {about} | {cells} |")
    others = [f"- `{o.job}`, `{o.way}`: {o.kind}{_reason(o)}: {o.said}" for o in found if o.kind != IDENTICAL]
    return "\n\n".join([summary(found), "\n".join(rows), "\n".join(others)])


def _reason(outcome: Outcome) -> str:
    known = KNOWN.get((outcome.job, outcome.way))
    return f" ({known.reason})" if known else ""


if __name__ == "__main__":
    main()
