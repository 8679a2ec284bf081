"""How long a job's first step takes at real depth: captures, plans, and what is compiled, beside plain PyTorch and torch.compile.

The seconds are from the finished model to the end of the first step. Each side has a process of its own, which finds no
compiled code, and sides take turns. The CPU's seconds count compilers too, and depend less on what else the machine does.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from job_trials import named_budgets
from jobs_by_field.job import Job
from jobs_by_field.ways import WAYS, StockLoss, StockModel, Way
from torch._inductor.utils import fresh_cache

SIDES: dict[str, Callable[[float], Way]] = {
    "plain": lambda _: Way(),
    "torch.compile": lambda _: StockModel(),
    "torch.compile of the loss": lambda _: StockLoss(),
    **{way: made for way, (_, made) in WAYS.items()},
}
AGAINST = {"compile": "torch.compile", "train_step": "torch.compile of the loss"}
"""By the beginning of a way's name, what its first step is compared with."""

Row = dict[str, Any]


def first_step(job: Job, side: str) -> Row:
    """Seconds of one first step, in this process, which has taken none before; `error` where it fails."""
    os.environ.pop("OVERSPILL_EFFORT", None)
    torch.manual_seed(0)
    try:
        seconds, cpu_seconds = named_budgets(lambda budget: _timed(job, SIDES[side](budget)))[0]
    except Exception as error:  # noqa: BLE001 - what ends in any error is told
        return {"error": f"{type(error).__name__} {error}".splitlines()[0]}
    return {"seconds": seconds, "cpu_seconds": cpu_seconds}


def _timed(job: Job, way: Way) -> tuple[float, float]:
    torch._dynamo.reset()
    before = _cpu_seconds()
    try:
        with fresh_cache():  # a budget that was refused has left nothing either
            next(iter(job.trains(way, layers=job.deep)))
        return time.perf_counter() - way.begun, _cpu_seconds() - before
    finally:
        way.close()


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def table(rows: Iterable[Row]) -> str:
    """The medians of seconds and of CPU seconds, a row a job, in Markdown; in brackets, over torch.compile's, round by round."""
    taken: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in rows:
        found = taken.setdefault((row["job"], row["layers"]), {}).setdefault(row["side"], [])
        found += [row] if "seconds" in row else []
    lines = [f"| job | layers | {' | '.join(SIDES)} |", f"|---|---|{'---|' * len(SIDES)}"]
    for (job, layers), sides in taken.items():
        lines.append(f"| `{job}` | {layers} | {' | '.join(_cells(sides))} |")
    return "\n".join(lines)


def _cells(sides: dict[str, list[Row]]) -> Iterator[str]:
    for side in SIDES:
        ours, theirs = sides.get(side, []), sides.get(AGAINST.get(side.partition("-")[0], ""), [])
        if side not in sides:
            yield "not run"
        elif not ours:
            yield "refused"
        else:
            yield f"{_over(ours, theirs, 'seconds')}, CPU {_over(ours, theirs, 'cpu_seconds')}"


def _over(ours: list[Row], theirs: list[Row], what: str) -> str:
    found = f"{statistics.median(row[what] for row in ours):.1f} s"
    if not theirs:
        return found
    return f"{found} ({statistics.median(a[what] / b[what] for a, b in zip(ours, theirs, strict=False)):.2f})"
