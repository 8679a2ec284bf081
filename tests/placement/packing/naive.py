"""The greedy and the skyline heuristic in a few lines each, as published: oracles of the native ones."""

from __future__ import annotations

from collections.abc import Sequence

from overspill.core import Block, Trace
from overspill.placement.packing.problem import Problem


def up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def greedy(trace: Trace, order: Sequence[int], fit: str) -> tuple[int, ...]:
    """Offsets of all blocks, those pinned first, the others in `order`: the lowest hole, or the smallest."""
    offsets = {i: block.pinned for i, block in enumerate(trace.blocks) if block.pinned is not None}
    for i in order:
        block = trace.blocks[i]
        if i in offsets:
            continue
        top, holes = 0, []
        for low, nbytes in sorted(
            (offsets[j], trace.blocks[j].nbytes) for j in offsets if meet(block, trace.blocks[j])
        ):
            if up(top, block.alignment) + block.nbytes <= low:
                holes.append((low - top, top))
            top = max(top, low + nbytes)
        chosen = (holes[0] if fit == "first" else min(holes)) if holes else (0, top)
        offsets[i] = up(chosen[1], block.alignment)
    return tuple(offsets.get(i, 0) for i in range(len(trace.blocks)))  # one that never lives is not in `order`


def meet(a: Block, b: Block) -> bool:
    """Whether two blocks are ever live together."""
    return any(s < f and e < t for s, t in a.pieces for e, f in b.pieces)


def skyline(problem: Problem, keys: Sequence[float]) -> tuple[int, ...]:
    """Offsets by section 3.2 of Sekiyama et al. (2018), of blocks without gaps and pins and of alignment 1."""
    lives = list(zip(problem.start.tolist(), problem.end.tolist(), problem.nbytes.tolist(), strict=True))
    heights = [0] * max((end for _, end, _ in lives), default=0)
    unplaced = sorted(range(len(keys)), key=lambda i: -keys[i])
    offsets = dict.fromkeys(unplaced, 0)
    while unplaced:
        # The lowest line, of equal ones the leftmost, as far as it goes.
        height = min(heights)
        start = heights.index(height)
        end = next((t for t in range(start, len(heights)) if heights[t] != height), len(heights))
        inside = [i for i in unplaced if start <= lives[i][0] and lives[i][1] <= end]
        if inside:
            born, dies, nbytes = lives[inside[0]]
            offsets[inside[0]] = height
            unplaced.remove(inside[0])
            heights[born:dies] = [height + nbytes] * (dies - born)
        else:
            walls = [heights[t] for t in (start - 1, end) if 0 <= t < len(heights)]
            heights[start:end] = [min(walls)] * (end - start)
    return tuple(offsets[i] for i in range(len(keys)))
