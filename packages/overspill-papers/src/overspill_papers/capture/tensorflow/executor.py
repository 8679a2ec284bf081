"""Memory of a step in TensorFlow's executor.

Buffers live by reference count, in the order of its ready queue. GPU kernels are cheap for the host, so the executor
runs them itself, first ready first (`common_runtime/executor.cc`; `OpKernel::IsExpensive`). A buffer is freed when its
last reader has run. cuDNN's convolutions try every algorithm within the workspace's limit at the first use of a shape.
From then on they use the fastest (`kernels/conv_ops.cc`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from overspill.capture.recording.ledger import Ledger
from overspill.capture.recording.recording import RecordedOp, Recording
from overspill.core import Device, Phase, TensorKind
from overspill.costs import Sizes, fastest_workspace_bytes, workspaces
from overspill.costs.scratch import Scratch

from . import kernels
from .graph import GraphOp, Output, StepGraph

WORKSPACE_LIMIT_BYTES = 4 << 30
"""TF_CUDNN_WORKSPACE_LIMIT_IN_MB where it is not set."""
ITERATIONS = 2
"""The first tries algorithms, the second runs as all later ones do."""
_BACKWARD = ("gradients", "gradient_tape")
_KINDS = {
    Phase.FORWARD: TensorKind.ACTIVATION,
    Phase.BACKWARD: TensorKind.OUTPUT_GRADIENT,
    Phase.UPDATE: TensorKind.TEMPORARY,
}
TRIAL = "conv_trial"
"""The family of scratch that is tried, and omitted if memory is short."""


@dataclass
class _Buffer:
    """A buffer that tensors refer to, with its reference count."""

    allocation: int
    nbytes: int
    references: int = 0
    """Uses still to come."""
    persistent: bool = False
    """Whether it is a variable's, which is never freed."""


def record(graph: StepGraph, device: Device, *, iterations: int = ITERATIONS) -> Recording:
    """Return the recording of some steps of `graph`, which is pruned first, on `device`."""
    return _Executor(graph.pruned(), device).run(iterations)


class _Executor:
    def __init__(self, graph: StepGraph, device: Device) -> None:
        self.graph, self.device = graph, device
        self.order = list(_ready_order(graph))
        self._uses: dict[Output, int] = {}
        for op in graph.ops:
            for read in op.inputs:
                self._uses[read] = self._uses.get(read, 0) + 1
        for fetch in graph.fetches:
            for index in range(len(graph.ops[fetch].makes)):
                self._uses[Output(fetch, index)] = self._uses.get(Output(fetch, index), 0) + 1
        self._held: dict[Output, _Buffer] = {}  # tensors that are there: by the output that made them
        self._kept: dict[int, _Buffer] = {}  # variables and constants
        self._ledger = Ledger()
        self._tuned: set[tuple[str, Sizes]] = set()
        self._iteration = 0
        self._phases = self._phases_of_ops()
        self._gradients = self._gradients_of_variables()

    def run(self, iterations: int) -> Recording:
        """Run all steps, after allocating the variables."""
        for position in self.order:
            op = self.graph.ops[position]
            if op.type in kernels.VARIABLES or op.type == "Const":
                self._keep(position, op)
        starts = []
        for self._iteration in range(iterations):
            starts.append(self._ledger.events)
            for position in self.order:
                self._execute(position, self.graph.ops[position])
            for fetch in self.graph.fetches:
                for index in range(len(self.graph.ops[fetch].makes)):
                    self._release(self._held.get(Output(fetch, index)))
            self._held.clear()
        parameters = sum(self._kept[op].nbytes for op in self.graph.trained if op in self._kept) // 4
        return self._ledger.recording(starts, parameters)

    def _keep(self, position: int, op: GraphOp) -> None:
        if not op.makes or not kernels.is_large(op.makes[0]):
            return
        kind = TensorKind.BUFFER
        if position in self.graph.trained:
            kind = TensorKind.PARAMETER
        elif position in self.graph.states:
            kind = TensorKind.OPTIMIZER_STATE
        buffer = self._allocate(op.makes[0].nbytes, kind, op.name, op, Phase.FORWARD)
        buffer.persistent = True
        self._kept[position] = buffer

    def _execute(self, position: int, op: GraphOp) -> None:
        phase = self._phases[position]
        read = [self._buffer(entry) for entry in op.inputs]
        made = self._outputs(position, op, read, phase)
        reads = tuple(dict.fromkeys(b.allocation for b in read if b is not None))
        writes = tuple(dict.fromkeys(b.allocation for b in made if b is not None))
        # Record the op.
        if reads or writes:
            self._ledger.add(RecordedOp(op.type, _layer(op), phase, self._iteration, reads, writes))
        # Count the uses to come; what has none is freed at once.
        for index, buffer in enumerate(made):
            uses = self._uses.get(Output(position, index), 0)
            if buffer is not None and uses:
                buffer.references += uses
                self._held[Output(position, index)] = buffer
            elif buffer is not None:
                self._free_if_unused(buffer)
        for buffer in read:
            self._release(buffer)

    def _outputs(self, position: int, op: GraphOp, read: list[_Buffer | None], phase: Phase) -> list[_Buffer | None]:
        """Return the buffers of an op's outputs.

        A buffer is that of a variable, of an input, or new; None for an output on the host.
        """
        if position in self._kept:
            return [self._kept[position]]
        # Outputs without a buffer of their own.
        if op.type in kernels.NOTHING or op.type in kernels.VARIABLES:
            return [None] * len(op.makes)
        if op.type in kernels.ALIASES or kernels.is_update(op):
            return [
                self._named(read[index], Output(position, index)) if index < len(read) else None
                for index in range(len(op.makes))
            ]
        # Inputs whose buffers the outputs take.
        places: dict[int, _Buffer] = {}
        for source, target in kernels.forwards(op):
            buffer = read[source] if source < len(read) else None
            if target not in places and buffer is not None and self._may_take(buffer, op.makes[target].nbytes):
                places[target] = buffer
        made: list[_Buffer | None] = []
        for index, output in enumerate(op.makes):
            if not kernels.is_large(output):
                made.append(None)
            elif index in places:
                made.append(self._named(places[index], Output(position, index)))
            else:
                kind = self._kind(position, index, op, phase)
                made.append(self._allocate(output.nbytes, kind, op.name, op, phase))
        if op.type in kernels.CONVOLUTIONS:
            made[:1] = [self._convolved(op, made[0], phase)]
        return made

    def _convolved(self, op: GraphOp, output: _Buffer | None, phase: Phase) -> _Buffer | None:
        """Return the output of a convolution, after its temporaries; one of them may have become the output."""
        sizes = kernels.convolution(self.graph, op)
        if sizes is None or output is None:
            return output
        nbytes, last_is_output = kernels.temporaries(op, sizes)
        kind = self._ledger.allocations[output.allocation].kind
        # The kernel's temporaries.
        beside = [self._allocate(size, TensorKind.TEMPORARY, op.name, op, phase) for size in nbytes[:-1]]
        result = self._allocate(nbytes[-1], kind if last_is_output else TensorKind.TEMPORARY, op.name, op, phase)
        # The first time, each algorithm is tried with its workspace.
        if (op.type, sizes) not in self._tuned:
            self._tuned.add((op.type, sizes))
            for size in workspaces(sizes, self.device):
                if 0 < size <= WORKSPACE_LIMIT_BYTES:
                    self._scratch(size, op, phase)
        best = fastest_workspace_bytes(sizes, self.device, WORKSPACE_LIMIT_BYTES)
        if best:
            self._scratch(best, op, phase)
        for buffer in [*beside, output if last_is_output else result]:
            self._ledger.end(buffer.allocation)
        return result if last_is_output else output

    def _scratch(self, nbytes: int, op: GraphOp, phase: Phase) -> None:
        scratch = Scratch(TRIAL, (nbytes,), "float32")
        self._ledger.end(self._allocate(nbytes, TensorKind.WORKSPACE, op.name, op, phase, scratch).allocation)

    def _kind(self, position: int, index: int, op: GraphOp, phase: Phase) -> TensorKind:
        if op.type in kernels.INPUTS:
            return TensorKind.INPUT
        if Output(position, index) in self._gradients:
            return TensorKind.GRADIENT
        return _KINDS[phase]

    def _named(self, buffer: _Buffer | None, output: Output) -> _Buffer | None:
        """Return the buffer that `output` has taken over; if backward made it, it is a gradient if `output` is one."""
        if buffer is not None and output in self._gradients:
            made = self._ledger.allocations[buffer.allocation]
            if made.kind is TensorKind.OUTPUT_GRADIENT:
                self._ledger.rename(buffer.allocation, TensorKind.GRADIENT)
        return buffer

    def _phases_of_ops(self) -> list[Phase]:
        """Return each op's phase.

        What reads backward and is not named so is the optimizer's, but for sums of gradients and what backward reads.
        """
        phases = [_phase(op) for op in self.graph.ops]
        read_by_backward: set[int] = set()
        for position in reversed(self.order):
            if phases[position] is Phase.BACKWARD or position in read_by_backward:
                read_by_backward.update(entry.op for entry in self.graph.ops[position].inputs)
        for position in self.order:
            op = self.graph.ops[position]
            read = [phases[entry.op] for entry in op.inputs]
            if phases[position] is Phase.FORWARD and (Phase.BACKWARD in read or Phase.UPDATE in read):
                sums = op.type == "AddN" and all(phase is Phase.BACKWARD for phase in read)
                phases[position] = Phase.BACKWARD if sums or position in read_by_backward else Phase.UPDATE
        return phases

    def _gradients_of_variables(self) -> set[Output]:
        """Return what the optimizer reads of backward, through ops that forward it."""
        found: set[Output] = set()
        left = [
            read for op, phase in zip(self.graph.ops, self._phases, strict=True) if phase is Phase.UPDATE
            for read in op.inputs if self._phases[read.op] is Phase.BACKWARD
        ]  # fmt: skip
        while left:
            entry = left.pop()
            found.add(entry)
            source = self.graph.ops[entry.op]
            if source.type in kernels.ALIASES and source.inputs and entry.number < len(source.inputs):
                left.append(source.inputs[entry.number])
        return found

    def _buffer(self, entry: Output) -> _Buffer | None:
        return self._held.get(entry) or self._kept.get(entry.op)

    def _may_take(self, buffer: _Buffer, nbytes: int) -> bool:
        """Return whether an op may overwrite its input's buffer: it holds the only reference to it."""
        return not buffer.persistent and buffer.references == 1 and buffer.nbytes == nbytes

    def _release(self, buffer: _Buffer | None) -> None:
        if buffer is not None and not buffer.persistent:
            buffer.references -= 1
            self._free_if_unused(buffer)

    def _free_if_unused(self, buffer: _Buffer) -> None:
        if not buffer.persistent and buffer.references == 0 and not self._ledger.has_ended(buffer.allocation):
            self._ledger.end(buffer.allocation)

    def _allocate(
        self, nbytes: int, kind: TensorKind, name: str, op: GraphOp, phase: Phase, scratch: Scratch | None = None
    ) -> _Buffer:
        return _Buffer(self._ledger.allocate(nbytes, kind, name, phase, _layer(op), scratch), nbytes)


def _ready_order(graph: StepGraph) -> Iterator[int]:
    """Yield the ops in the order in which they become ready.

    First come those without dependencies, then each one once its last dependency has run.
    """
    followers: list[list[int]] = [[] for _ in graph.ops]
    waiting = [0] * len(graph.ops)
    for position, op in enumerate(graph.ops):
        for before in (*(read.op for read in op.inputs), *op.controls):
            followers[before].append(position)
            waiting[position] += 1
    ready = deque(position for position, count in enumerate(waiting) if not count)
    while ready:
        position = ready.popleft()
        yield position
        for follower in followers[position]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)


def _phase(op: GraphOp) -> Phase:
    if kernels.is_update(op):
        return Phase.UPDATE
    scopes = op.name.split("/")
    return Phase.BACKWARD if any(scope.startswith(_BACKWARD) for scope in scopes) else Phase.FORWARD


def _layer(op: GraphOp) -> str:
    """Return the layer of an op: its name without backward's prefix and the op's own last part."""
    parts = [part for part in op.name.split("/") if not part.startswith(_BACKWARD)]
    return "/".join(parts[:-1]) or parts[-1]
