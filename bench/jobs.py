"""The jobs that people bring, each trained plainly and under a budget by four ways in: which have the same bits?

    python bench/jobs.py [--jobs NAME,…] [--ways NAME,…] [--processes 2] [--json FILE]
    python bench/jobs.py --list
    python bench/jobs.py --read bench/results/jobs.json

The jobs are in `jobs_by_field/`, three or four steps each. By `compile` and `train_step` a job is compared with plain
PyTorch, with Inductor's kernels with stock torch.compile: losses, gradients (those of a planned step live inside it),
parameters, buffers, optimizer state and the generator, after every step. Each runs in a process of its own, on one thread.
A process that ends, or that gives no answer in time, is a crash. Of a record that is there, what was not run stays.
Libraries that some need: `make jobs-libraries`. Some hours for all, most of it in C++ compilers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OVERSPILL_EFFORT", "0.1")  # the bits are asked for, not the best of plans
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
import torch._inductor.compile_fx
from job_trials import CRASH, IDENTICAL, KINDS, NOT_INSTALLED, Outcome, judge, row
from jobs_by_field import JOBS
from jobs_by_field.job import Job
from jobs_by_field.ways import WAYS
from paired import json_record

Case = tuple[Job, str]
Running = dict[Connection, tuple[Case, BaseProcess, float]]
LIBRARIES = ("transformers", "peft", "timm", "diffusers", "torch_geometric", "monai", "torchvision")


def main() -> None:
    """Run jobs, or print a record."""
    options = _options()
    if options.read is not None:
        print(table(read(options.read)))
        return
    if options.list:
        print(*(f"{job.name:28s} {job.field:15s} {job.about}" for job in JOBS.values()), sep="\n")
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [(JOBS[name], way) for name in options.jobs for way in options.ways]
    _load(job for job, _ in cases)
    found = {(o.job, o.way): o for o in read(options.json)} if options.json and options.json.exists() else {}
    ran = []
    for outcome in outcomes(cases, options.processes, options.seconds, loud=options.verbose):
        ran.append(outcome)
        print(f"{len(ran):3d}/{len(cases)} {outcome.seconds:5.1f} s  {told(outcome)}", flush=True)
        if options.json:
            found[outcome.job, outcome.way] = outcome
            rows = [row(found[name, way]) for name in JOBS for way in WAYS if (name, way) in found]
            options.json.write_text(json_record(torch.device("cpu"), libraries=_versions(), jobs=rows))
    print(summary(ran))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), metavar="NAME,…")
    parser.add_argument("--ways", default=",".join(WAYS), metavar="NAME,…")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0, help="a job that takes longer is a crash")
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
    return options


def _load(jobs: Iterable[Job]) -> None:
    """Import what the jobs need, before processes begin that each would."""
    for job in {job.name: job for job in jobs}.values():
        if not job.missing:
            job.load()


def outcomes(cases: Sequence[Case], processes: int, seconds: float, *, loud: bool = False) -> Iterator[Outcome]:
    """The outcome of each case, as they come, so many at once."""
    waiting = deque(cases)
    running: Running = {}
    while waiting or running:
        while waiting and len(running) < processes:
            job, way = waiting.popleft()
            if missing := job.missing:
                yield Outcome.of(job, way, NOT_INSTALLED, ", ".join(missing))
            else:
                connection, process = _started(job, way, loud=loud)
                running[connection] = (job, way), process, time.perf_counter()
        answered = wait(list(running), timeout=1.0)
        for connection, ((job, way), process, begun) in list(running.items()):
            late = time.perf_counter() - begun > seconds
            if connection in answered or late:
                del running[connection]
                yield _ended(connection, process, (job, way), seconds, late=late)


def _started(job: Job, way: str, *, loud: bool) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, job, way, loud), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _run(connection: Connection, job: Job, way: str, loud: bool) -> None:
    if not loud:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
    connection.send(judge(job, way, loud=loud))


def _ended(connection: Connection, process: BaseProcess, case: Case, seconds: float, *, late: bool) -> Outcome:
    """The outcome that a process sent, or what became of it."""
    try:
        return connection.recv() if connection.poll() else Outcome.of(*case, CRASH, f"no answer in {seconds:.0f} s")
    except EOFError:
        process.join()
        return Outcome.of(*case, CRASH, f"the process ended with {process.exitcode}")
    finally:
        if late:
            process.kill()
        process.join()
        connection.close()


def _versions() -> dict[str, str]:
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: found[name] for name in LIBRARIES if name in found}


def read(path: Path) -> list[Outcome]:
    """The outcomes of a record."""
    return [Outcome(**found) for found in json.loads(path.read_text())["jobs"]]


def told(outcome: Outcome) -> str:
    """One line on an outcome."""
    vain = f" ({outcome.named_in_vain} budgets named in vain)" if outcome.named_in_vain else ""
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
    others = [f"- `{o.job}`, `{o.way}`: {o.kind}: {o.said}" for o in found if o.kind != IDENTICAL]
    return "\n\n".join([summary(found), "\n".join(rows), "\n".join(others)])


if __name__ == "__main__":
    main()
