"""Turn a Schedule into the Trace of its allocations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from overspill.core import (
    OF_OPS,
    Block,
    Graph,
    Instruction,
    LayerType,
    Mobility,
    Op,
    Phase,
    Schedule,
    TensorKind,
    Trace,
    Verb,
)

STAYING = frozenset({LayerType.LINEAR, LayerType.SOFTMAX, LayerType.LOSS, LayerType.DROPOUT})
"""Layers whose tensors are "reclaimed" (Dymem, Algorithm 3, line 2: FC, softmax, dropout), and losses, for softmax."""


def trace_of(graph: Graph, schedule: Schedule, groups: Iterable[Sequence[int]] = ()) -> Trace:
    """Return the trace of `schedule` on `graph`, without the owners of `owned_trace`."""
    return owned_trace(graph, schedule, groups)[0]


def owned_trace(
    graph: Graph, schedule: Schedule, groups: Iterable[Sequence[int]] = ()
) -> tuple[Trace, tuple[int, ...]]:
    """Return the blocks that `schedule` allocates, and their owners: a tensor, or `-1 - op`.

    Positions count instructions; a workspace is a block of its own. Ops of one of `groups`, which must be adjacent, run
    in one call: their workspaces are live together.

    The lower bound of this trace is the peak that `check` finds. Blocks have the mobility of Dymem's Algorithm 3, which
    is about feature maps and their gradients. Workspaces are temporary. Weights and their gradients are movable,
    because they stay where they are.
    """
    device = _Device(graph, schedule)
    together = {op: (place, len(group)) for group in groups for place, op in enumerate(group)}
    started: dict[int, int] = {}  # where collectives that run were started
    for position, instruction in enumerate(schedule.instructions):
        if instruction.verb is Verb.START:
            started[instruction.target] = position
            device.begin(position, graph.ops[instruction.target])
        elif instruction.verb in OF_OPS and (since := started.pop(instruction.target, None)) is not None:
            device.end(since, position, graph.ops[instruction.target], instruction)
        elif instruction.verb is Verb.RUN:
            op = graph.ops[instruction.target]
            place, count = together.get(op.id, (0, 1))
            begin = position - place
            device.run(
                position, op, op.reads, op.writes, op.workspace_of(instruction.algorithm), (begin, begin + count)
            )
        elif instruction.verb is Verb.RECOMPUTE:
            op = graph.ops[instruction.target]
            twice = sum(graph.tensors[t].nbytes for t in op.recompute_writes if t in device.stays)
            workspace_bytes = op.workspace_of(instruction.algorithm) + twice
            device.run(position, op, op.recompute_reads, op.recompute_writes, workspace_bytes)
        elif instruction.verb is Verb.PREFETCH:
            device.stays[instruction.target] = _Stay(position)
        elif instruction.verb is Verb.FREE:
            device.free(position, instruction.target)
    # Close the blocks that are live at the end.
    for tensor in tuple(device.stays):
        device.free(len(schedule.instructions), tensor)
    return device.trace(), device.owners()


@dataclass
class _Stay:
    """A tensor's stay on the device: start, maker, and layers that read it."""

    since: int
    maker: Op | None = None
    """None for a prefetch."""
    readers: set[str] = field(default_factory=set)
    waits: bool = False
    """Whether it was made in forward, and not read by the layer that ran next."""

    def read_by(self, layer: str) -> None:
        if self.maker is None or self.maker.layer != layer:
            self.readers.add(layer)

    @property
    def mobility(self) -> Mobility:
        """Mobility by Dymem's Algorithm 3: layer type, number of readers, and waiting."""
        if self.maker is not None and self.maker.layer_type in STAYING:
            return Mobility.RECLAIMED
        return Mobility.TEMPORARY if len(self.readers) > 1 or self.waits else Mobility.MOVABLE


class _Device:
    """Tensors on the device as instructions run, and blocks of those that are gone."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.stays = {t.id: _Stay(0) for t in graph.tensors if t.persistent and t.id not in schedule.stored}
        self._graph = graph
        self._layer = ""
        self._twice: dict[int, int] = {}  # by collective that runs, the bytes that it makes a second time
        self._ended: set[int] = set()
        self._made: list[_Stay] = []  # by the layer that ran last
        self._blocks: list[
            tuple[int, int, int, str, Mobility, int, int]
        ] = []  # start, end, bytes, name, mobility, references, owner

    def run(
        self,
        position: int,
        op: Op,
        reads: Iterable[int],
        writes: Iterable[int],
        workspace_bytes: int,
        during: tuple[int, int] | None = None,
    ) -> None:
        """Run an op; its workspace is live `during` these positions, by default its own."""
        for tensor in reads:
            if tensor in self.stays:
                self.stays[tensor].read_by(op.layer)
        # A new layer begins: tensors that it does not read wait.
        if op.layer != self._layer:
            for stay in self._made:
                stay.waits = op.layer not in stay.readers
            self._made, self._layer = [], op.layer
        for tensor in writes:
            if tensor not in self.stays:
                self.stays[tensor] = _Stay(position, op)
                if op.phase is Phase.FORWARD:
                    self._made.append(self.stays[tensor])
        if workspace_bytes:
            name = f"workspace of {op.name}"
            begin, end = during or (position, position + 1)
            self._blocks.append((begin, end, workspace_bytes, name, Mobility.TEMPORARY, 0, -1 - op.id))

    def begin(self, position: int, op: Op) -> None:
        """Begin a collective, whose results are allocated from now on."""
        again = op.id in self._ended
        writes = op.recompute_writes if again else op.writes
        self._twice[op.id] = sum(self._graph.tensors[t].nbytes for t in writes if t in self.stays) if again else 0
        for tensor in writes:
            self.stays.setdefault(tensor, _Stay(position, op))

    def end(self, since: int, position: int, op: Op, instruction: Instruction) -> None:
        """Wait for a collective, whose workspace was live all the while."""
        self._ended.add(op.id)
        reads, writes = (
            (op.reads, op.writes) if instruction.verb is Verb.RUN else (op.recompute_reads, op.recompute_writes)
        )
        workspace_bytes = op.workspace_of(instruction.algorithm) + self._twice.pop(op.id)
        self.run(position, op, reads, writes, workspace_bytes, (since, position + 1))

    def free(self, position: int, tensor: int) -> None:
        """Remove a tensor from the device."""
        stay, made = self.stays.pop(tensor), self._graph.tensors[tensor]
        stays = made.persistent or made.kind is TensorKind.GRADIENT
        mobility = Mobility.MOVABLE if stays else stay.mobility
        self._blocks.append((stay.since, position, made.nbytes, made.name, mobility, len(stay.readers), tensor))

    def trace(self) -> Trace:
        """Return all blocks, numbered by start."""
        return Trace(
            tuple(
                Block(i, start, end, nbytes, name, mobility=mobility, references=references)
                for i, (start, end, nbytes, name, mobility, references, _) in enumerate(sorted(self._blocks))
            )
        )

    def owners(self) -> tuple[int, ...]:
        """Return the owner of each block, as in `owned_trace`."""
        return tuple(owner for *_, owner in sorted(self._blocks))
