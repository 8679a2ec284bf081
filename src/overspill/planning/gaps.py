"""Find gaps in which tensors can be swapped out, and for how long."""

from __future__ import annotations

from overspill.core import Tensor

from .step_program import Gap, StepProgram

SMALLEST_MOVE_BYTES = 1024
"""Smaller tensors stay on the device: a transfer's fixed cost outweighs the gain."""


def may_move(tensor: Tensor) -> bool:
    """Return whether `tensor` can be offloaded and is large enough to be worth it."""
    return tensor.movable and tensor.nbytes >= SMALLEST_MOVE_BYTES


def may_swap(program: StepProgram, gap: Gap) -> bool:
    """Return whether a tensor can be swapped to the store and back in `gap`.

    It must be movable, with at least one step in between. Two graphs for forward and backward add two rules. A tensor
    that leaves in forward must be gone by its end. One that backward reads comes back no sooner than its start.
    """
    away = gap.end - gap.start + (program.length if gap.wraps else 0)
    return not gap.rematerialized and away > 1 and may_move(program.graph.tensors[gap.tensor])


def swappable_gaps(program: StepProgram) -> list[Gap]:
    """Return all gaps in which a swap to the store fits."""
    return [gap for gap in program.gaps if may_swap(program, gap)]


def earliest_return(program: StepProgram, gap: Gap) -> int:
    """Return the first step before which the tensor of `gap` may be prefetched."""
    boundary = program.end_of_forward
    if gap.wraps:
        return 0
    if program.graph.whole_step:
        return gap.start + 1
    return max(gap.start + 1, boundary if gap.end >= boundary else 0)


def latest_release(program: StepProgram, gap: Gap) -> int:
    """Return the last step before which the tensor of `gap` may be released."""
    boundary = program.end_of_forward
    if gap.wraps:
        return program.length
    if program.graph.whole_step:
        return gap.end
    return min(gap.end, boundary) if gap.start < boundary else gap.end


def saved_gaps(program: StepProgram) -> dict[int, Gap]:
    """Return the gaps between forward and backward of movable saved tensors, by tensor."""
    boundary = program.end_of_forward
    return {
        g.tensor: g
        for g in swappable_gaps(program)
        if g.start < boundary <= g.end and not program.graph.tensors[g.tensor].persistent
    }
