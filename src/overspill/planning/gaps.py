"""Which gaps leave room for a swap to the store and back, and how early and late its ends may be."""

from __future__ import annotations

from overspill.core import Tensor

from .step_program import Gap, StepProgram

SMALLEST_MOVE_BYTES = 1024
"""Smaller tensors stay: a transfer's fixed cost outweighs so little."""


def may_move(tensor: Tensor) -> bool:
    """Whether it is possible and worth a transfer to take `tensor` off the device."""
    return tensor.movable and tensor.nbytes >= SMALLEST_MOVE_BYTES


def may_swap(program: StepProgram, gap: Gap) -> bool:
    """Whether `gap` leaves room for a swap to the store: a movable tensor and at least one step in between.

    Where forward and backward are two graphs, a tensor that leaves in forward must be gone by its end, and one that is
    read in backward comes back no sooner than its start.
    """
    away = gap.end - gap.start + (program.length if gap.wraps else 0)
    return not gap.rematerialized and away > 1 and may_move(program.graph.tensors[gap.tensor])


def swappable_gaps(program: StepProgram) -> list[Gap]:
    """All gaps that leave room for a swap to the store."""
    return [gap for gap in program.gaps if may_swap(program, gap)]


def earliest_return(program: StepProgram, gap: Gap) -> int:
    """The first step before which `gap`'s tensor may be prefetched: not in a forward graph if backward's needs it."""
    boundary = program.end_of_forward
    if gap.wraps:
        return 0
    if program.graph.whole_step:
        return gap.start + 1
    return max(gap.start + 1, boundary if gap.end >= boundary else 0)


def latest_release(program: StepProgram, gap: Gap) -> int:
    """The last step before which `gap`'s tensor may be released: not after a forward graph that it leaves in."""
    boundary = program.end_of_forward
    if gap.wraps:
        return program.length
    if program.graph.whole_step:
        return gap.end
    return min(gap.end, boundary) if gap.start < boundary else gap.end


def saved_gaps(program: StepProgram) -> dict[int, Gap]:
    """For each movable saved tensor, the gap between its last use in forward and its first in backward."""
    boundary = program.end_of_forward
    return {
        g.tensor: g
        for g in swappable_gaps(program)
        if g.start < boundary <= g.end and not program.graph.tensors[g.tensor].persistent
    }
