"""Turn one step of an eager recording into a Graph."""

from __future__ import annotations

from overspill.capture.layers import layer_type_of
from overspill.core import Graph, LayerType, Op, Phase, Tensor
from overspill.core.errors import RequestError

from .recording import Recording


def graph_of(recording: Recording, name: str, *, iteration: int | None = None) -> Graph:
    """Return the Graph of one iteration; by default the last but one, a steady step.

    Tensors are storages that ops of the iteration touch. If phases alternate (micro-batches, a GradScaler) it is a
    whole step. Nothing is recomputable: a recording has an op's memory, not how to run it again. Scratch is left out,
    because it depends on the GPU. Raises RequestError if the iteration was not recorded.
    """
    if iteration is None:
        iteration = max(recording.iterations - 2, 0)
    if not 0 <= iteration < recording.iterations:
        raise RequestError(f"iteration {iteration} was not recorded; there are {recording.iterations}")
    # Ops of the iteration, and the storages that they touch.
    begin = recording.starts[iteration]
    end = recording.starts[iteration + 1] if iteration + 1 < recording.iterations else recording.events
    steps = [op for op in recording.ops if op.iteration == iteration and op.writes]  # views are no ops
    # A construction that runs before the first iteration is counted to it, but is not part of a step.
    steps = [op for op in steps if all(recording.allocations[w].end > begin for w in op.writes)]
    touched = sorted({position for op in steps for position in (*op.reads, *op.writes)})
    ids = {position: i for i, position in enumerate(touched)}
    tensors = []
    for position, i in ids.items():
        allocation = recording.allocations[position]
        # What was there before persists as far as the step knows, even if the program frees it on the way.
        before = allocation.start < begin
        tensors.append(
            Tensor(
                i, allocation.nbytes, allocation.kind, allocation.name, allocation.shape or (allocation.nbytes,),
                allocation.dtype or "uint8",
                persistent=before, movable=not before and allocation.end < end,
            )
        )  # fmt: skip
    ops = tuple(
        Op(
            i, op.name, op.layer, LayerType.UPDATE if op.phase is Phase.UPDATE else layer_type_of(op.name), op.phase,
            tuple(ids[p] for p in op.reads), tuple(ids[p] for p in op.writes),
            flops=op.flops,
            moved_bytes=op.moved_bytes or sum(recording.allocations[p].nbytes for p in (*op.reads, *op.writes)),
            frames=(op.frame,) if op.frame >= 0 else (),
        )
        for i, op in enumerate(steps)
    )  # fmt: skip
    # Tensors that are still there when the iteration ends.
    left = tuple(ids[p] for p in touched if not tensors[ids[p]].persistent and recording.allocations[p].end >= end)
    order = [list(Phase).index(op.phase) for op in ops]
    return Graph(name, tuple(tensors), ops, left, frames=recording.frames, whole_step=order != sorted(order))
