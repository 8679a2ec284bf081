"""The process that runs CP-SAT: a request as JSON on standard input, an answer on standard output, all in whole units.

It imports nothing of ours, so that it can be run by its file name.
"""

from __future__ import annotations

import json
import sys
import time
from math import ceil
from typing import Any, TypedDict


class Request(TypedDict):
    """Piece r of block `owner[r]` is live in `[start[r], end[r])`; the other lists are by block."""

    owner: list[int]
    start: list[int]
    end: list[int]
    size: list[int]
    alignment: list[int]
    pinned: list[int | None]
    hint: list[int]
    lower_bound: int
    capacity: int
    minimise: bool
    seconds: float
    seed: int
    workers: int


class Answer(TypedDict):
    """Offsets within the capacity, None if none were found, and the least peak that was proven to be needed."""

    offsets: list[int] | None
    bound: int


def solve(request: Request) -> Answer:
    """Find offsets within the capacity, the lowest peak if that is to be minimised."""
    began = time.perf_counter()
    from ortools.sat.python import cp_model  # noqa: PLC0415 - takes a second

    model = cp_model.CpModel()
    offsets = _add_blocks(model, request)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(request["seconds"] - (time.perf_counter() - began), 0.0)
    solver.parameters.num_workers = request["workers"]
    solver.parameters.random_seed = request["seed"]
    status = solver.solve(model)
    bound = request["lower_bound"]
    if status == cp_model.INFEASIBLE:
        return {"offsets": None, "bound": request["capacity"] + 1}
    if request["minimise"]:
        bound = max(bound, ceil(solver.best_objective_bound - 1e-6))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return {"offsets": [solver.value(offset) for offset in offsets], "bound": bound}
    return {"offsets": None, "bound": bound}


def _add_blocks(model: Any, request: Request) -> list[Any]:
    """Add a place for each block below the peak; the offsets."""
    capacity = request["capacity"]
    peak = model.new_int_var(request["lower_bound"], capacity, "peak")
    offsets: list[Any] = []
    spans = []
    for size, alignment, pinned, hint in zip(
        request["size"], request["alignment"], request["pinned"], request["hint"], strict=True
    ):
        if pinned is None:
            step = model.new_int_var(0, max(capacity - size, 0) // alignment, "")
            model.add_hint(step, min(hint, max(capacity - size, 0)) // alignment)
            offsets.append(step * alignment)
        else:
            offsets.append(model.new_constant(pinned))
        model.add(offsets[-1] + size <= peak)
        spans.append(model.new_fixed_size_interval_var(offsets[-1], size, ""))
    times = [
        model.new_fixed_size_interval_var(start, end - start, "")
        for start, end in zip(request["start"], request["end"], strict=True)
    ]
    model.add_no_overlap_2d(times, [spans[block] for block in request["owner"]])
    if request["minimise"]:
        model.minimize(peak)
    return offsets


if __name__ == "__main__":
    json.dump(solve(json.load(sys.stdin)), sys.stdout)
