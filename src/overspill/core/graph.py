"""The Graph: one training step as a sequence of ops over tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from .frames import Frame, source_of, stack_of
from .saved import Saved


class TensorKind(StrEnum):
    """Kinds of tensors, by use."""

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
    """The kind of layer that an op belongs to."""

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
    """Forward, backward or update; phases of a step come in this order."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True)
class Tensor:
    """A storage, never a view, of `nbytes` on the device while live.

    `persistent`: there before the first op and after the last one (parameters, buffers, optimizer state, inputs).
    `movable`: the schedule may take it off the device between uses; false for what the caller holds a reference to. A
    tensor that is both may also stay in the store from one step to the next.
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
    """One implementation of an op: workspace in bytes, and relative time.

    `slowdown` is its time over that of the fastest.
    """

    name: str
    workspace_bytes: int
    slowdown: float = 1.0


class CollectiveKind(StrEnum):
    """What ranks do with a tensor together: one gets parts of all, a part of the sum, or the sum."""

    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE = "reduce"


@dataclass(frozen=True)
class Collective:
    """What an op sends between `ranks` processes.

    `nbytes` are those of the whole: of a gather's result, of what a scatter or a reduction is given.
    """

    kind: CollectiveKind
    nbytes: int
    ranks: int


@dataclass(frozen=True)
class Op:
    """One operation: tensors that it reads and writes, and its workspace.

    `algorithms` are its implementations among which a schedule may choose, the fastest first, whose workspace
    `workspace_bytes` then is; empty if there is no choice.

    `workspaces` are the blocks that it takes one after another, each behind the result before, where they are several or
    lie behind a result: two gradients of a convolution. Empty: one of `workspace_bytes`, behind all results.

    A tensor in both `reads` and `writes` is updated in place. `recompute_reads` and `recompute_writes` are what a
    recomputation needs and makes; narrower than `reads` and `writes` if the op also updates a state, as batch norm does
    with its running statistics, and empty if the op is not `recomputable`.

    `frames` are the innermost lines of Python that ran it, by position in the graph's `frames`: one for an op, several
    for a fused kernel, none if unknown.

    `given` are those of `writes` that it can write into memory that it is given, in place of taking memory itself.

    `checkpoint` is the number of the program's own checkpoint that computes it again in backward; 0: none does.

    `collective` is what it sends between ranks; None for an op of this rank alone.
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
    given: tuple[int, ...] = ()
    collective: Collective | None = None
    workspaces: tuple[int, ...] = ()

    def workspace_of(self, algorithm: int) -> int:
        """Workspace in bytes of an algorithm, by number. Raises IndexError if there is none."""
        return self.algorithms[algorithm].workspace_bytes if algorithm else self.workspace_bytes

    def slowdown_of(self, algorithm: int) -> float:
        """Time of an algorithm, by number, over that of the fastest. Raises IndexError if there is none."""
        return self.algorithms[algorithm].slowdown if algorithm else 1.0


@dataclass(frozen=True)
class Graph(Saved):
    """One training step: `ops` in execution order over `tensors`.

    Ids are positions in these tuples. `outputs` must be on the device when the step ends, as persistent tensors are.
    `whole_step`: one graph runs all of it, so that ops of different phases may interleave where results stay the same;
    otherwise forward and backward are two graphs, followed by the update. `frames` are the lines of Python behind ops,
    each once for each stack.
    """

    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...] = ()
    whole_step: bool = False
    frames: tuple[Frame, ...] = ()

    @cached_property
    def producer(self) -> dict[int, int]:
        """The op that first writes each non-persistent tensor, by tensor id."""
        found: dict[int, int] = {}
        for op in self.ops:
            for tensor in op.writes:
                if not self.tensors[tensor].persistent:
                    found.setdefault(tensor, op.id)
        return found

    def may_recompute(self, tensor: int) -> bool:
        """Whether the op that makes a tensor, one that is not persistent, can make it again."""
        return tensor in self.ops[self.producer[tensor]].recompute_writes

    def is_gathered(self, tensor: int) -> bool:
        """Whether a tensor is what a collective makes."""
        made = self.producer.get(tensor)
        return made is not None and self.ops[made].collective is not None

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
        """The line that ran an op, as `model.py:42 forward`; empty if unknown."""
        return "" if op is None else source_of(self.frames, self.ops[op].frames)

    def stacks(self, op: int | None) -> tuple[tuple[Frame, ...], ...]:
        """The call stacks that ran an op, outermost line first, if known."""
        return () if op is None else tuple(stack_of(self.frames, at) for at in self.ops[op].frames)

    def without_frames(self) -> Graph:
        """The same step without its lines of Python."""
        return replace(self, ops=tuple(replace(op, frames=()) for op in self.ops), frames=())

    @cached_property
    def read_only(self) -> frozenset[int]:
        """Movable tensors that no op writes, such as frozen weights.

        Their copies in the store stay valid.
        """
        return frozenset(t.id for t in self.tensors if t.persistent and t.movable and not self.written_by[t.id])

    @cached_property
    def returned(self) -> frozenset[int]:
        """Outputs that stay on the device once made, because a forward graph returns them."""
        return frozenset() if self.whole_step else frozenset(self.outputs)

    @cached_property
    def persistent_bytes(self) -> int:
        """Bytes that are on the device during the whole step."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.persistent)

    def bytes_of(self, kind: TensorKind) -> int:
        """Bytes of all tensors of `kind`."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.kind is kind)


def numbered(ops: Iterable[Op]) -> tuple[Op, ...]:
    """`ops` with their positions as ids, as in a Graph."""
    return tuple(replace(op, id=position) for position, op in enumerate(ops))
