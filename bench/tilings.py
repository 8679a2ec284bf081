"""Perfect tilings: blocks that fill a square without a gap, so that the optimum is known, and far from what greedy finds."""

from __future__ import annotations

import random
from dataclasses import replace

from overspill.core import Block, Trace

SIDE = 1 << 20
"""Bytes, and positions, of the square."""
NARROWEST = 1 / 5
"""A cut leaves at least this share on each side."""


def tiling(blocks: int, seed: int = 0) -> Trace:
    """A square that guillotine cuts part into so many `blocks`: the layout that they had takes `SIDE` bytes, the bound.

    Each cut goes through one piece, which is drawn by its area, across its longer side or, for one cut of four, its
    shorter one.
    """
    draw = random.Random(seed)
    pieces = [(0, SIDE, 0, SIDE)]
    areas = [float(SIDE) * SIDE]
    while len(pieces) < blocks:
        at = draw.choices(range(len(pieces)), areas)[0]
        start, end, low, high = pieces[at]
        in_time = (end - start > high - low) != (draw.random() < 1 / 4)
        first, last = (start, end) if in_time else (low, high)
        if last - first < 2:
            continue
        share = NARROWEST + (1 - 2 * NARROWEST) * draw.random()
        cut = min(max(first + round(share * (last - first)), first + 1), last - 1)
        parts = (
            [(start, cut, low, high), (cut, end, low, high)]
            if in_time
            else [(start, end, low, cut), (start, end, cut, high)]
        )
        pieces[at : at + 1] = parts
        areas[at : at + 1] = [float(b - a) * (d - c) for a, b, c, d in parts]
    draw.shuffle(pieces)
    return Trace(tuple(Block(i, start, end, high - low) for i, (start, end, low, high) in enumerate(pieces)))


def ragged(trace: Trace, seed: int = 0, share: float = 0.03) -> Trace:
    """The same blocks, each up to `share` smaller at both ends of its life and in size: hardly any two fit exactly."""
    draw = random.Random(seed)

    def less(length: int) -> int:
        return int(share * draw.random() * length)

    return Trace(
        tuple(
            replace(b, start=b.start + less(life), end=b.end - less(life), nbytes=b.nbytes - less(b.nbytes))
            for b in trace.blocks
            for life in (b.end - b.start,)
        )
    )
