"""Boxes: blocks that fill a rectangle of time and bytes, packed as one.

Bottom up, the two that waste least become one: stacked if they ever live together, otherwise side by side. Boxing is
how approximations of this problem are proven (Buchsbaum et al., "OPT versus LOAD in dynamic storage allocation", 2003).
Here it finds guillotine cuts, whose parts fit together exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from overspill.placement.packing._packing import merges
from overspill.placement.packing.columns import ANYWHERE, Integers
from overspill.placement.packing.keys import KEYS
from overspill.placement.packing.problem import Problem

from .greedy import place
from .skyline import packer_of, solid

WASTES = (0.0, 0.005, 0.01)
"""Shares of a box that may be empty, tried in turn."""
PACK_KEYS = ("load", "area", "sections", "size", "lifetime")
"""Keys by which boxes are packed."""


def boxed_layouts(problem: Problem, seed: int = 0) -> Iterator[Integers]:
    """Yield the offsets of all blocks, for each layout of the boxes.

    With a `seed`, pairs that waste the same are taken at random. It yields nothing if blocks are pinned, have gaps, or
    differ in alignment.
    """
    if problem.gap_start.size or (problem.pinned != ANYWHERE).any() or np.unique(problem.alignment).size != 1:
        return
    filled = solid(problem)
    flat, wastes = merges(filled.start, filled.end, filled.nbytes, WASTES[-1], seed)
    made = flat.reshape(-1, 6)
    sizes: set[int] = {0}
    for share in WASTES:
        count = int(np.searchsorted(np.maximum.accumulate(np.array(wastes)), share, side="right"))
        if count in sizes:
            continue
        sizes.add(count)
        # Pack the boxes by several keys, and unpack their blocks.
        boxes, whole = _boxes(filled, made[:count])
        packer = packer_of(whole)
        for key in PACK_KEYS:
            offsets = packer.pack(KEYS[key](whole).astype(np.float64), whole.lower_bound_bytes, None)
            assert offsets is not None
            unpacked = _unpacked(len(filled), made[:count], boxes, offsets)
            yield place(filled, np.argsort(unpacked, kind="stable"), "first")  # what lies above waste comes down


def _boxes(problem: Problem, made: Integers) -> tuple[Integers, Problem]:
    """Return the outermost boxes, and the problem of packing them; a block alone is a box too."""
    outermost = np.ones(len(problem) + len(made), dtype=bool)
    outermost[made[:, :2].ravel()] = False
    boxes = np.flatnonzero(outermost)
    # A problem whose blocks are the boxes.
    start = np.concatenate([problem.start, made[:, 2]])[boxes]
    end = np.concatenate([problem.end, made[:, 3]])[boxes]
    return boxes, replace(
        problem,
        index=np.arange(len(boxes)),
        start=start,
        end=end,
        nbytes=np.concatenate([problem.nbytes, made[:, 4]])[boxes],
        alignment=np.repeat(problem.alignment[:1], len(boxes)),
        pinned=np.full(len(boxes), ANYWHERE),
        lifetime=end - start,
        gap_first=np.zeros(len(boxes) + 1, dtype=np.int64),
    )


def _unpacked(blocks: int, made: Integers, boxes: Integers, offsets: Integers) -> Integers:
    """Return the blocks' offsets if box `boxes[k]` is at `offsets[k]`."""
    found = [0] * (blocks + len(made))
    for box, offset in zip(boxes.tolist(), offsets.tolist(), strict=True):
        found[box] = offset
    for box in range(len(made) - 1, -1, -1):
        first, second, *_, shift = made[box].tolist()
        found[first] = found[blocks + box]
        found[second] = found[blocks + box] + shift
    return np.array(found[:blocks], dtype=np.int64)
