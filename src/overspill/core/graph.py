"""The Graph: one training step as a sequence of ops over tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from .frames import Frame, source_of, stack_of
from .saved import Saved

SMALL_UPDATE_BYTES = 1 << 20
"""An update on the host that reads and writes no more is small: a call of the optimizer takes longer than that."""


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

    A tensor that is both persistent and movable may also stay in the store from one step to the next.
    """

    id: int
    nbytes: int
    kind: TensorKind
    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool = False
    """Whether it exists before the first op and after the last one.

    Parameters, buffers, optimizer state and inputs do.
    """
    movable: bool = False
    """Whether the schedule may take it off the device between uses.

    False for tensors to which the caller holds a reference.
    """


@dataclass(frozen=True)
class Algorithm:
    """One implementation of an op: workspace in bytes, and relative time."""

    name: str
    workspace_bytes: int
    slowdown: float = 1.0
    """Its time over that of the fastest."""


class CollectiveKind(StrEnum):
    """What ranks do with a tensor together: one gets parts of all, a part of the sum, or the sum."""

    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE = "reduce"


@dataclass(frozen=True)
class Collective:
    """What an op sends between `ranks` processes."""

    kind: CollectiveKind
    nbytes: int
    """Bytes of the whole: the result of a gather, the input of a scatter or a reduction."""
    ranks: int


@dataclass(frozen=True)
class Op:
    """One operation: tensors that it reads and writes, and its workspace.

    A tensor in both `reads` and `writes` is updated in place.
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
    """What it reads and writes, as often as its kernels do."""
    recomputable: bool = False
    recompute_reads: tuple[int, ...] = ()
    """Tensors that a recomputation needs; empty if the op is not `recomputable`.

    They are fewer than `reads` if the op also updates a state, as batch norm does with its running statistics.
    """
    recompute_writes: tuple[int, ...] = ()
    """Tensors that a recomputation makes, likewise."""
    algorithms: tuple[Algorithm, ...] = ()
    """The implementations that a schedule may choose from, the fastest first; empty if it has no choice.

    `workspace_bytes` is then that of the fastest.
    """
    frames: tuple[int, ...] = ()
    """The innermost lines of Python that ran it, by position in the graph's `frames`.

    An op has one, a fused kernel several, an op of unknown source none.
    """
    checkpoint: int = 0
    """The number of the program's own checkpoint that computes it again in backward; 0: none does."""
    given: tuple[int, ...] = ()
    """Those of `writes` that it can write into memory that it is given, without allocating any itself."""
    collective: Collective | None = None
    """What it sends between ranks; None for an op of this rank alone."""
    workspaces: tuple[int, ...] = ()
    """Blocks that it allocates one after another, each after the result before it.

    Used if it has several, or allocates one after a result, as for the two gradients of a convolution. Empty: one block
    of `workspace_bytes`, after all results.
    """
    moved_on_host_bytes: int = 0
    """What an update reads and writes if the host runs it, with other kernels; 0: nobody knows."""

    def workspace_of(self, algorithm: int) -> int:
        """Return the workspace in bytes of an algorithm. Raises IndexError if it does not exist."""
        return self.algorithms[algorithm].workspace_bytes if algorithm else self.workspace_bytes

    def slowdown_of(self, algorithm: int) -> float:
        """Return the time of an algorithm over that of the fastest. Raises IndexError if it does not exist."""
        return self.algorithms[algorithm].slowdown if algorithm else 1.0


@dataclass(frozen=True)
class Graph(Saved):
    """One training step: `ops` in execution order over `tensors`.

    Ids are positions in these tuples.
    """

    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...] = ()
    """Tensors that must be on the device when the step ends, as persistent tensors are."""
    whole_step: bool = False
    """Whether one graph runs the whole step.

    Ops of different phases may then interleave if results stay the same. Otherwise forward and backward are two graphs,
    followed by the update.
    """
    frames: tuple[Frame, ...] = ()
    """The lines of Python behind ops, each once for each stack."""

    def moved_on_host_bytes(self, op: Op) -> int:
        """Return the bytes that an update reads and writes on the host: if nobody knows, each of its tensors once."""
        return op.moved_on_host_bytes or sum(self.tensors[t].nbytes for t in op.reads + op.writes)

    def is_small_on_host(self, op: Op) -> bool:
        """Return whether an update on the host takes little beside the call of the optimizer that it is in."""
        return self.moved_on_host_bytes(op) <= SMALL_UPDATE_BYTES

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
        """Return whether the op that makes a non-persistent tensor can make it again."""
        return tensor in self.ops[self.producer[tensor]].recompute_writes

    def is_gathered(self, tensor: int) -> bool:
        """Return whether a collective makes the tensor."""
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
        """Return the last forward op that reads or writes `tensor`, or None."""
        return max((op for op in self.uses[tensor] if self.ops[op].phase is Phase.FORWARD), default=None)

    def first_backward_use(self, tensor: int) -> int | None:
        """Return the first backward op that reads or writes `tensor`, or None."""
        return min((op for op in self.uses[tensor] if self.ops[op].phase is Phase.BACKWARD), default=None)

    @cached_property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """Ops by layer name, layers in the order of their first op."""
        found: dict[str, list[int]] = {}
        for op in self.ops:
            found.setdefault(op.layer, []).append(op.id)
        return {layer: tuple(ops) for layer, ops in found.items()}

    def source(self, op: int | None) -> str:
        """Return the line that ran an op, as `model.py:42 forward`; empty if unknown."""
        return "" if op is None else source_of(self.frames, self.ops[op].frames)

    def stacks(self, op: int | None) -> tuple[tuple[Frame, ...], ...]:
        """Return the call stacks that ran an op, outermost line first, if known."""
        return () if op is None else tuple(stack_of(self.frames, at) for at in self.ops[op].frames)

    def without_frames(self) -> Graph:
        """Return the same step without its lines of Python."""
        return replace(self, ops=tuple(replace(op, frames=()) for op in self.ops), frames=())

    @cached_property
    def structure(self) -> str:
        """Return what a schedule is valid for, as text that does not depend on the sizes of inputs and activations."""
        fixed = {TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE}
        tensors = [(t.kind.value, t.persistent, t.movable, t.nbytes if t.kind in fixed else 0) for t in self.tensors]
        ops = [
            (op.name, op.phase.value, op.reads, op.writes, op.recompute_reads, op.recompute_writes, op.given,
             len(op.algorithms), op.collective and op.collective.kind.value)
            for op in self.ops
        ]  # fmt: skip
        return repr((tensors, ops, self.outputs, self.whole_step))

    @cached_property
    def read_only(self) -> frozenset[int]:
        """Movable tensors that no op writes, such as frozen weights; their copies in the store stay valid."""
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
        """Return the bytes of all tensors of `kind`."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.kind is kind)


def numbered(ops: Iterable[Op]) -> tuple[Op, ...]:
    """Return `ops` with their positions as ids, as in a Graph."""
    return tuple(op if op.id == position else replace(op, id=position) for position, op in enumerate(ops))
