"""What `auto` may choose from: every trip that a tensor may make to the store, and every slower algorithm.

Twin of the candidates in native/planning/trips.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from overspill.core import Device

from .base import possible_trips
from .program import Program
from .select import Candidate


def candidates(program: Program, device: Device, seconds: Sequence[float]) -> list[Candidate]:
    """Every trip that a tensor may make, and every slower algorithm in place of the next faster one.

    A trip is up to three candidates: while its tensor is away without a stall, while it would still be leaving, and
    while it would already be arriving. The latter two cost the wait for it.
    """
    found = []
    clock = program.clock(seconds)
    for gap in possible_trips(program):
        nbytes = program.graph.tensors[gap.tensor].nbytes
        out, back = device.offload_seconds(nbytes), device.prefetch_seconds(nbytes)
        disturbed = (out + back) * device.transfer_compute_share
        first, last = gap.start + 1, min(gap.end, program.length)
        gone = int(np.searchsorted(clock, clock[first] + out))
        needed = int(np.searchsorted(clock, clock[last] - back, side="right")) - 1
        away, leaving, arriving = _parts(first, gone, needed, last, program.length, wraps=gap.wraps)
        if away:
            found.append(Candidate(away, nbytes, disturbed, out, back, gap, "away"))
        if leaving:
            found.append(Candidate(leaving, nbytes, disturbed + out, 0.0, 0.0, gap, "leaving"))
        if arriving:
            found.append(Candidate(arriving, nbytes, disturbed + back, 0.0, 0.0, gap, "arriving"))
    for position, step in enumerate(program.steps):
        op, chosen = program.op(step), program.algorithm(step)
        for number, (one, other) in enumerate(pairwise(op.algorithms[chosen:]), start=chosen + 1):
            slower = seconds[op.id] * (other.slowdown - one.slowdown)
            saved = one.workspace_bytes - other.workspace_bytes
            span = (position, position + 1)
            found.append(Candidate((span,), saved, slower, position=position, algorithm=number))
    return found


_Spans = tuple[tuple[int, int], ...]


def _parts(first: int, gone: int, needed: int, last: int, length: int, *, wraps: bool) -> tuple[_Spans, _Spans, _Spans]:
    """The steps of a trip: away, leaving, arriving. One too short to be away without a stall is leaving all along."""
    away: _Spans = ()
    leaving: _Spans = ((first, last),)
    arriving: _Spans = ()
    if wraps:
        gone, needed = min(gone, length), max(needed, 0)
        away, leaving, arriving = ((0, needed), (gone, length)), ((first, gone),), ((needed, last),)
    elif gone < needed:
        away, leaving, arriving = ((gone, needed),), ((first, gone),), ((needed, last),)
    return _filled(away), _filled(leaving), _filled(arriving)


def _filled(spans: _Spans) -> _Spans:
    return tuple((start, end) for start, end in spans if start < end)
