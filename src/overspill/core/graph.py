"""The Graph: one training step as a sequence of ops over tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from .frames import Frame, source_of, stack_of
from .saved import Saved


class TensorKind(StrEnum):
    """What a tensor is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER_STATE = "optimizer_state"
    GRADIENT = "gradient"
    INPUT = "input"
    ACTIVATION = "activation"  # made in forward, read in backward: a saved tensor, or feature map
    OUTPUT_GRADIENT = "output_gradient"  # made in backward, on its way to the layers before
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"
    COMMUNICATION = "communication"  # what collectives of several GPUs send from and receive into


class LayerType(StrEnum):
    """What kind of layer an op belongs to."""

    CONV = "conv"
    LINEAR = "linear"
    NORM = "norm"
    ACTIVATION = "activation"
    POOL = "pool"
    DROPOUT = "dropout"
    SOFTMAX = "softmax"
    ATTENTION = "attention"
    EMBEDDING = "embedding"
    JOIN = "join"
    LOSS = "loss"
    UPDATE = "update"
    OTHER = "other"


class Phase(StrEnum):
    """The part of the step that an op runs in; phases follow one another in this order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class Tensor:
    """A storage (never a view): `nbytes` bytes on the device while it is live.

    `persistent`: there before the first op and after the last one (parameters, buffers, optimizer state, inputs).
    `movable`: the schedule may take it off the device between uses; false for what the caller holds a reference to.
    What is both is at home in the store as well: a schedule may keep it there from one step to the next.
    """

    id: int
    nbytes: int
    kind: TensorKind
    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool = False
    movable: bool = False


@dataclass(frozen=True)
class Algorithm:
    """One way to carry out an op: takes `workspace_bytes` while it runs, and `slowdown` times the op's shortest time."""

    name: str
    workspace_bytes: int
    slowdown: float = 1.0


@dataclass(frozen=True)
class Op:
    """One operation: reads tensors, writes tensors, takes `workspace_bytes` more while it runs.

    `algorithms` are the ways to carry it out among which a schedule may choose, the fastest first, whose workspace
    `workspace_bytes` then is; empty where there is no choice.

    A tensor in both `reads` and `writes` is updated in place. `recompute_reads` and `recompute_writes` say what a
    recomputation needs and makes; they are narrower than `reads` and `writes` where the op also updates a state, as
    batch norm does with its running statistics, and empty when the op is not `recomputable`.

    `frames` are the lines of Python that ran it, the innermost ones, by their positions in the graph's `frames`: one, of a
    kernel that does the work of several ops those of all, and none where they are not known.

    `checkpoint` is the number of the program's own checkpoint that computes it again in backward; 0: none does.
    """

    id: int
    name: str
    layer: str
    layer_type: LayerType
    phase: Phase
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    workspace_bytes: int = 0
    flops: int = 0
    moved_bytes: int = 0
    recomputable: bool = False
    recompute_reads: tuple[int, ...] = ()
    recompute_writes: tuple[int, ...] = ()
    algorithms: tuple[Algorithm, ...] = ()
    frames: tuple[int, ...] = ()
    checkpoint: int = 0

    def workspace_of(self, algorithm: int) -> int:
        """Workspace in bytes under algorithm number `algorithm`. Raises IndexError where there is none."""
        return self.algorithms[algorithm].workspace_bytes if algorithm else self.workspace_bytes

    def slowdown_of(self, algorithm: int) -> float:
        """Time under algorithm number `algorithm` over the shortest. Raises IndexError where there is none."""
        return self.algorithms[algorithm].slowdown if algorithm else 1.0


@dataclass(frozen=True)
class Graph(Saved):
    """One training step: `ops` in execution order over `tensors`; ids are positions in these tuples.

    `outputs` must be on the device when the step ends, beside the persistent tensors. `whole_step`: one graph runs it
    all, so that ops of different phases may interleave where none can tell; else forward and backward are two graphs,
    and the update follows them. `frames` are the lines of Python that ops were run by, each once for each stack.
    """

    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...] = ()
    whole_step: bool = False
    frames: tuple[Frame, ...] = ()

    @cached_property
    def producer(self) -> dict[int, int]:
        """The op that first writes each tensor that is not persistent."""
        found: dict[int, int] = {}
        for op in self.ops:
            for tensor in op.writes:
                if not self.tensors[tensor].persistent:
                    found.setdefault(tensor, op.id)
        return found

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the ops that read or write it, in order."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for op in self.ops:
            for tensor in dict.fromkeys(op.reads + op.writes):
                found[tensor].append(op.id)
        return tuple(tuple(uses) for uses in found)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the ops that read it, in order."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for op in self.ops:
            for tensor in dict.fromkeys(op.reads):
                found[tensor].append(op.id)
        return tuple(tuple(readers) for readers in found)

    @cached_property
    def written_by(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor, the ops that write it, in order."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for op in self.ops:
            for tensor in op.writes:
                found[tensor].append(op.id)
        return tuple(tuple(writers) for writers in found)

    @cached_property
    def reference_counts(self) -> tuple[int, ...]:
        """For each tensor, how many ops read it (vDNN Fig. 3's Refcnt)."""
        return tuple(len(readers) for readers in self.consumers)

    def last_forward_use(self, tensor: int) -> int | None:
        """The last forward op that reads or writes `tensor`, or None."""
        return max((op for op in self.uses[tensor] if self.ops[op].phase is Phase.FORWARD), default=None)

    def first_backward_use(self, tensor: int) -> int | None:
        """The first backward op that reads or writes `tensor`, or None."""
        return min((op for op in self.uses[tensor] if self.ops[op].phase is Phase.BACKWARD), default=None)

    @cached_property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """Ops by layer name, layers in the order of their first op."""
        found: dict[str, list[int]] = {}
        for op in self.ops:
            found.setdefault(op.layer, []).append(op.id)
        return {layer: tuple(ops) for layer, ops in found.items()}

    def source(self, op: int | None) -> str:
        """The line that ran an op, as `model.py:42 forward`; empty where it is not known, and for None."""
        return "" if op is None else source_of(self.frames, self.ops[op].frames)

    def stacks(self, op: int | None) -> tuple[tuple[Frame, ...], ...]:
        """The stacks that ran an op, each with the outermost line first; none where they are not known, and for None."""
        return () if op is None else tuple(stack_of(self.frames, at) for at in self.ops[op].frames)

    def without_frames(self) -> Graph:
        """The same step from whatever lines of Python."""
        return replace(self, ops=tuple(replace(op, frames=()) for op in self.ops), frames=())

    @cached_property
    def read_only(self) -> frozenset[int]:
        """What a schedule may move and no op writes, a frozen weight: once in the store, its copy there stays right."""
        return frozenset(t.id for t in self.tensors if t.persistent and t.movable and not self.written_by[t.id])

    @cached_property
    def returned(self) -> frozenset[int]:
        """Outputs that stay on the device once they are made, for forward is a graph of its own and hands them out."""
        return frozenset() if self.whole_step else frozenset(self.outputs)

    @cached_property
    def persistent_bytes(self) -> int:
        """Bytes that are on the device during the whole step."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.persistent)

    def bytes_of(self, kind: TensorKind) -> int:
        """Bytes of all tensors of `kind`."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.kind is kind)


def numbered(ops: Iterable[Op]) -> tuple[Op, ...]:
    """`ops` with their positions as their ids, as a Graph has them; what they read and write stays as it is."""
    return tuple(replace(op, id=position) for position, op in enumerate(ops))
