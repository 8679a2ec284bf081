"""The process that runs CP-SAT on a JSON request.

A request on standard input, an answer on standard output, all in whole units. It imports nothing of ours, so that it
can be run by its file name.
"""

from __future__ import annotations

import json
import sys
import time
from math import ceil
from typing import Any, TypedDict


class CpSatRequest(TypedDict):
    """A placement problem, by pieces and by block.

    Piece r of block `owner[r]` is live in `[start[r], end[r])`; the other lists are by block.
    """

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


class CpSatAnswer(TypedDict):
    """Offsets within the capacity, or None, and the proven lower bound on the peak."""

    offsets: list[int] | None
    bound: int


def solve(request: CpSatRequest) -> CpSatAnswer:
    """Find offsets within the capacity, with the lowest peak if `minimise`."""
    began = time.perf_counter()
    from ortools.sat.python import cp_model  # noqa: PLC0415 - takes a second

    model = cp_model.CpModel()
    offsets = _add_blocks(model, request)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(request["seconds"] - (time.perf_counter() - began), 0.0)
    solver.parameters.num_workers = request["workers"]
    solver.parameters.random_seed = request["seed"]
    status = solver.solve(model)
    # What was found and proven.
    bound = request["lower_bound"]
    if status == cp_model.INFEASIBLE:
        return {"offsets": None, "bound": request["capacity"] + 1}
    if request["minimise"]:
        bound = max(bound, ceil(solver.best_objective_bound - 1e-6))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return {"offsets": [solver.value(offset) for offset in offsets], "bound": bound}
    return {"offsets": None, "bound": bound}


def _add_blocks(model: Any, request: CpSatRequest) -> list[Any]:
    """Add each block below the peak to the model; returns the offsets."""
    capacity = request["capacity"]
    peak = model.new_int_var(request["lower_bound"], capacity, "peak")
    offsets: list[Any] = []
    spans = []
    for size, alignment, pinned, hint in zip(
        request["size"], request["alignment"], request["pinned"], request["hint"], strict=True
    ):
        # An address is a multiple of the alignment, or fixed.
        if pinned is None:
            step = model.new_int_var(0, max(capacity - size, 0) // alignment, "")
            model.add_hint(step, min(hint, max(capacity - size, 0)) // alignment)
            offsets.append(step * alignment)
        else:
            offsets.append(model.new_constant(pinned))
        model.add(offsets[-1] + size <= peak)
        spans.append(model.new_fixed_size_interval_var(offsets[-1], size, ""))
    # Rectangles of time and bytes must not overlap.
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
