"""Make the Graph of one rank of a sharded step: shards, a gather and a scatter for each group, as FSDP2 has them.

Parameters, their optimizer state and reduced gradients are shards by rows, as FSDP2's `fully_shard` cuts them. A group
is gathered before its first reader, and its gradients are scattered once all are there. Both go through one packed
buffer: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, all_gather_output and reduce_scatter_input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from overspill.core import Collective, CollectiveKind, Graph, LayerType, Op, Phase, Tensor, TensorKind, numbered

GATHER, SCATTER = "step.gather", "step.scatter"
"""Ops that get whole parameters from all ranks' shards, and a shard's gradient from all ranks' gradients."""


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together, by name."""

    name: str
    parameters: tuple[str, ...]
    again: bool = True
    """Whether the program gathers them a second time for backward (`reshard_after_forward`)."""


@dataclass(frozen=True)
class Sharding:
    """The sharding of a step over `ranks`."""

    ranks: int
    groups: tuple[Group, ...]
    shard_bytes: int | None = None
    """Bytes of an element of shards and optimizer state; None: as in the captured parameters."""


def sharded(graph: Graph, sharding: Sharding) -> Graph:
    """Return the step of one of the ranks, given the whole step of a model that is not sharded."""
    return _Sharded(graph, sharding).graph()


class _Sharded:
    def __init__(self, graph: Graph, sharding: Sharding) -> None:
        self.before, self.sharding = graph, sharding
        self.tensors = list(graph.tensors)
        self.by_name = {t.name: t.id for t in graph.tensors if t.kind is TensorKind.PARAMETER and t.persistent}
        self.group_of = {
            self.by_name[name]: g for g in sharding.groups for name in g.parameters if name in self.by_name
        }
        self.full: dict[int, int] = {}  # by parameter, what it is gathered into
        self.shard: dict[int, int] = {}  # by gradient, its part of the sum
        self.gradients: dict[str, list[int]] = defaultdict(list)  # by group

    def graph(self) -> Graph:
        for parameter in self.group_of:
            self._cut(parameter)
        self._find_gradients()
        return replace(self.before, ops=numbered(self._ops()), tensors=tuple(self.tensors))

    def _cut(self, parameter: int) -> None:
        """Make a parameter and its state shards, with a new tensor for the whole."""
        whole = self.tensors[parameter]
        self.full[parameter] = self._add(replace(whole, name=f"{whole.name} gathered", persistent=False, movable=True))
        self.tensors[parameter] = self._part(whole)
        for tensor in self.before.tensors:
            ours = tensor.kind is TensorKind.OPTIMIZER_STATE and tensor.name.startswith(f"{whole.name}.")
            if ours and tensor.shape == whole.shape:
                self.tensors[tensor.id] = self._part(tensor)

    def _part(self, whole: Tensor) -> Tensor:
        rows = -(-(whole.shape[0] if whole.shape else 1) // self.sharding.ranks)
        shape = (rows, *whole.shape[1:])
        each = whole.nbytes // max(1, prod(whole.shape))
        return replace(whole, shape=shape, nbytes=prod(shape) * (self.sharding.shard_bytes or each))

    def _add(self, tensor: Tensor) -> int:
        self.tensors.append(replace(tensor, id=len(self.tensors)))
        return len(self.tensors) - 1

    def _find_gradients(self) -> None:
        """Find the gradient that each update reads, and add a new tensor for the shard of the sum."""
        made = {t for op in self.before.ops if op.phase is Phase.BACKWARD for t in op.writes}
        for op in self.before.ops:
            parameters = [t for t in op.writes if t in self.group_of]
            if op.phase is not Phase.UPDATE or not parameters:
                continue
            for gradient in op.reads:
                if gradient in made and gradient not in self.shard and not self.tensors[gradient].persistent:
                    part = self._part(self.before.tensors[parameters[0]])
                    new = replace(
                        part, kind=TensorKind.GRADIENT, name=f"{part.name}.grad", persistent=False, movable=True
                    )
                    self.shard[gradient] = self._add(new)
                    self.gradients[self.group_of[parameters[0]].name].append(gradient)

    def _ops(self) -> Iterator[Op]:
        gathered: set[str] = set()
        # The op after which a group's gradients are all there.
        done: dict[int, list[Group]] = defaultdict(list)
        for group in self.sharding.groups:
            if gradients := self.gradients[group.name]:
                ready = max(i for t in gradients for i in self.before.written_by[t] if self._is_backward(i))
                done[ready].append(group)
        for op in self.before.ops:
            for parameter in dict.fromkeys(t for t in op.reads if t in self.group_of):
                group = self.group_of[parameter]
                if op.phase is not Phase.UPDATE and group.name not in gathered:
                    gathered.add(group.name)
                    yield self._gather(group)
            yield self._apart(op)
            for group in done.get(op.id, ()):
                yield self._scatter(group)

    def _is_backward(self, op: int) -> bool:
        return self.before.ops[op].phase is Phase.BACKWARD

    def _apart(self, op: Op) -> Op:
        """Return an op as the rank has it: on gathered parameters, or on shards once backward is done."""
        if op.phase is not Phase.UPDATE:
            return replace(
                op, reads=_through(op.reads, self.full), recompute_reads=_through(op.recompute_reads, self.full)
            )
        reads = _through(op.reads, self.shard)
        if reads == op.reads and not any(t in self.group_of for t in op.writes):
            return op
        # What it moves, and its temporaries, are as much less.
        before = sum(self.before.tensors[t].nbytes for t in op.reads)
        share = sum(self.tensors[t].nbytes for t in reads) / max(1, before)
        return replace(
            op,
            reads=reads,
            moved_bytes=int(share * op.moved_bytes),
            moved_on_host_bytes=int(share * op.moved_on_host_bytes),
            workspace_bytes=int(share * op.workspace_bytes),
            workspaces=(),
        )

    def _gather(self, group: Group) -> Op:
        reads = tuple(t for t, of in self.group_of.items() if of is group)
        writes = tuple(self.full[t] for t in reads)
        op = self._collective(GATHER, CollectiveKind.GATHER, group, Phase.FORWARD, reads, writes, writes)
        number = 1 + self.sharding.groups.index(group) + max((o.checkpoint for o in self.before.ops), default=0)
        return replace(
            op,
            recomputable=True,
            recompute_reads=reads,
            recompute_writes=writes,
            given=writes,
            checkpoint=number if group.again else 0,
        )

    def _scatter(self, group: Group) -> Op:
        reads = tuple(self.gradients[group.name])
        writes = tuple(self.shard[t] for t in reads)
        return self._collective(SCATTER, CollectiveKind.SCATTER, group, Phase.BACKWARD, reads, writes, reads)

    def _collective(
        self,
        name: str,
        kind: CollectiveKind,
        group: Group,
        phase: Phase,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        whole: Iterable[int],
    ) -> Op:
        nbytes = sum(self.tensors[t].nbytes for t in whole)
        return Op(
            0, name, group.name, LayerType.OTHER, phase, reads, writes, workspace_bytes=nbytes,
            collective=Collective(kind, nbytes, self.sharding.ranks),
        )  # fmt: skip


def _through(tensors: Sequence[int], others: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(others.get(t, t) for t in tensors)
