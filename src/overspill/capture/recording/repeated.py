"""A recorded step, repeated without a run."""

from __future__ import annotations

from dataclasses import replace

from overspill.core import Phase, TensorKind

from .recording import Allocation, RecordedOp, Recording


def repeated(recording: Recording) -> Recording | None:
    """Return a recording of two steps and an empty third one with the second step in its place.

    The third step frees what the second one left, as the second did with what the first one left. None if the second
    step is none of the first again: it has other ops in forward or backward, or leaves other tensors. The first may
    have more, which make what lasts.
    """
    _, begin, end = recording.starts
    made, length = recording.allocations, end - begin
    steps = [[op for op in recording.ops if op.iteration == step] for step in range(3)]
    left = [at for at, a in enumerate(made) if a.start < begin <= a.end < end]  # by the first step
    leaves = [at for at, a in enumerate(made) if begin <= a.start < end <= a.end]  # the second
    inside = [at for at, a in enumerate(made) if begin <= a.start < end]
    if steps[2] or made[-1].start >= end or len(left) != len(leaves):
        return None
    first = iter(_work(recording, steps[0], recording.starts[0]))
    if not all(op in first for op in _work(recording, steps[1], begin)):  # in that order
        return None
    if any(_place(made[one]) != _place(made[other]) for one, other in zip(left, leaves, strict=True)):
        return None
    again = {at: len(made) + n for n, at in enumerate(inside)} | dict(zip(left, leaves, strict=True))
    freed = {other: made[one].end for one, other in zip(left, leaves, strict=True)}
    before = tuple(
        replace(a, end=freed[at] + length if at in freed else a.end + length if a.end >= end else a.end)
        for at, a in enumerate(made)
    )
    after = tuple(
        replace(a, start=a.start + length, end=a.end + length, op=a.op if a.op < 0 else a.op + len(steps[1]))
        for a in (made[at] for at in inside)
    )

    def moved(positions: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(again.get(at, at) for at in positions)

    ops = tuple(replace(op, iteration=2, reads=moved(op.reads), writes=moved(op.writes)) for op in steps[1])
    return replace(recording, allocations=before + after, ops=recording.ops + ops, events=recording.events + length)


def _work(recording: Recording, step: list[RecordedOp], begin: int) -> list[tuple[str, str]]:
    """Return the ops of a step that make something, but for its update, which makes state in the first step."""
    made = recording.allocations
    ops = (op for op in step if op.phase is not Phase.UPDATE and op.writes)
    return [(op.name, op.layer) for op in ops if made[op.writes[0]].start >= begin]


def _place(allocation: Allocation) -> tuple[int, TensorKind, str, str, int]:
    return allocation.nbytes, allocation.kind, allocation.name, allocation.layer, allocation.stream
