"""All micro-batches of a whole step as one graph, layer by layer, so that a weight is read once for all of them.

The order is that of GreedySnake (arXiv 2512.17570, §4). The captured last micro-batch is copied; parameters, buffers
and optimizer state are shared. Each gradient is summed in the order of the micro-batches, as without this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from overspill.core import Graph, Op, Phase, TensorKind, numbered
from overspill.core import Tensor as CoreTensor
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.graphs import LazyGraphModule
from overspill.pytorch.storages import key_of, storage_key
from overspill.pytorch.trees import tree_map_only

from .effects import EFFECT
from .graph import HANDLE_BYTES, HANDLES, RANDOM_STATE, elsewhere
from .joint import StorageKey, draws, storages
from .whole_step import ACCUMULATE, CapturedStep

_NUMBERED = re.compile(r"(?:.*?\.)??\d+(?=\.|$)")
"""The path of a repeated block, as `model.layers.3`."""


def why_one_by_one(captured: CapturedStep) -> str:
    """Return why the micro-batches of a step have to run one after another; empty if they need not."""
    graph = captured.graph
    for node in captured.nodes.values():  # of some blocks, if the graph follows from these
        if draws(node):
            return f"{node.name} draws random numbers, whose order would change"
        if EFFECT in node.meta:
            return f"{node.name} has an effect outside of the step"
    for op in graph.ops:
        if op.phase is Phase.UPDATE or op.name == ACCUMULATE:
            continue
        changed = (graph.tensors[t] for t in op.writes if graph.tensors[t].persistent)
        if (first := next((t for t in changed if t.name != RANDOM_STATE), None)) is not None:
            return f"the step changes {first.name}, which each micro-batch reads after the one before"
    return ""


def before_the_last(graph: Graph) -> Graph:
    """Return a micro-batch before the last one, without the update and the state that it alone reads."""
    ops = [op for op in graph.ops if op.phase is not Phase.UPDATE]
    read = {t for op in ops for t in (*op.reads, *op.writes)}
    state = (TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE)
    tensors = (
        replace(t, nbytes=0, movable=False) if t.movable and t.kind in state and t.id not in read else t
        for t in graph.tensors
    )
    return replace(graph, tensors=tuple(tensors), ops=numbered(ops))


def own_inputs(captured: CapturedStep) -> list[fx.Node]:
    """Return the inputs that each micro-batch has of its own."""
    kinds, tensor_of = captured.graph.tensors, captured.tensor_of
    return [n for n in captured.joint.primals if all(kinds[tensor_of[k]].kind is TensorKind.INPUT for k in storages(n))]


def side_by_side(captured: CapturedStep, count: int, *, sums_stay: bool = False) -> CapturedStep:
    """Return `captured`, a micro-batch, with `count` of them; it has `why_one_by_one` nothing against.

    Its inputs are those of the first micro-batch, then those that each other one has of its own. Its results are the
    losses. Sums of gradients are inputs if they stay, as for other micro-batches before or behind these.
    """
    return _CopiedNodes(captured, count, sums_stay=sums_stay).build()


def graph_side_by_side(graph: Graph, count: int, *, sums_stay: bool = False) -> Graph:
    """Return the graph that `side_by_side` gives a step with this `graph`."""
    return _CopiedOps(graph, count, sums_stay=sums_stay).graph()


class _CopiedOps:
    """Copies ops and tensors."""

    def __init__(self, graph: Graph, count: int, *, sums_stay: bool) -> None:
        self._graph, self._count, self._sums_stay = graph, count, sums_stay
        self._tensors = list(graph.tensors)
        self._sums = {t for op in graph.ops if op.name == ACCUMULATE for t in op.writes}
        inputs = (t for t in graph.tensors if t.persistent and t.kind is TensorKind.INPUT)
        own = {t.id for t in inputs if t.name != elsewhere(TensorKind.INPUT)}
        self._given_bytes = sum(graph.tensors[t].nbytes for t in own)
        once = {t for op in graph.ops if op.phase is Phase.UPDATE for t in op.writes} | self._sums
        copied = [t for t in graph.tensors if t.id in own or not (t.persistent or t.id in once)]
        self._ids: list[dict[int, int]] = [{}]
        """For each micro-batch, the tensors that are not those of the first, by these."""
        for number in range(1, count):
            begin = len(self._tensors)
            self._ids.append({t.id: begin + i for i, t in enumerate(copied)})
            self._tensors += (
                replace(t, id=begin + i, name=f"{t.name} of micro-batch {number + 1}") for i, t in enumerate(copied)
            )

    def graph(self) -> Graph:
        """Return the graph of all."""
        ops = numbered(self._op(op, number) for op, number in self._order())
        outputs = {ids.get(t, t) for ids in self._ids for t in self._graph.outputs}
        return replace(self._graph, tensors=self._with_sizes(), ops=ops, outputs=tuple(sorted(outputs)))

    def _with_sizes(self) -> tuple[CoreTensor, ...]:
        """Return the tensors: fewer inputs are elsewhere, and sums that do not stay are made in the step."""
        movable, others = sum(t.movable for t in self._tensors), (self._count - 1) * self._given_bytes
        made = frozenset() if self._sums_stay else self._sums

        def nbytes(tensor: CoreTensor) -> int:
            if tensor.name == elsewhere(TensorKind.INPUT):
                return max(0, tensor.nbytes - others)
            return HANDLE_BYTES * movable if tensor.name == HANDLES else tensor.nbytes

        return tuple(replace(t, persistent=t.persistent and t.id not in made, nbytes=nbytes(t)) for t in self._tensors)

    def _order(self) -> Iterator[tuple[Op, int]]:
        """Yield ops with the number of their micro-batch: all of these layer by layer, then the update.

        Where forward turns into backward, each goes through the last layer and the loss both ways, so that only one has
        its logits at a time.
        """
        ops = self._graph.ops
        forward = _runs([op for op in ops if op.phase is Phase.FORWARD], self._places, ascending=True)
        backward = _runs([op for op in ops if op.phase is Phase.BACKWARD], self._places, ascending=False)
        for run in (*forward[:-1], [*forward[-1], *backward[0]], *backward[1:]):
            for number in range(self._count):
                yield from ((op, number) for op in run if number == 0 or op.reads or op.writes)
        yield from ((op, 0) for op in ops if op.phase is Phase.UPDATE)

    @property
    def _places(self) -> dict[str, int]:
        """The place of each block in forward, of layers with numbers and of others that have parameters."""
        graph, found = self._graph, dict[str, int]()
        for op in graph.ops:
            reads = any(graph.tensors[t].kind is TensorKind.PARAMETER for t in op.reads)
            if op.phase is Phase.FORWARD and (reads or _NUMBERED.match(op.layer)):
                found.setdefault(_block(op.layer), len(found))
        return found

    def _op(self, op: Op, number: int) -> Op:
        def mine(tensors: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(self._ids[number].get(t, t) for t in tensors)

        reads = op.reads
        if op.name == ACCUMULATE and number == 0 and not self._sums_stay:
            reads = tuple(t for t in reads if t not in self._sums)
        return replace(
            op, reads=mine(reads), writes=mine(op.writes), recompute_reads=mine(op.recompute_reads),
            recompute_writes=mine(op.recompute_writes), given=mine(op.given),
            checkpoint=op.checkpoint and op.checkpoint * self._count + number,
        )  # fmt: skip


class _CopiedNodes(_CopiedOps):
    """Copies nodes too."""

    def __init__(self, captured: CapturedStep, count: int, *, sums_stay: bool) -> None:
        super().__init__(captured.graph, count, sums_stay=sums_stay)
        self._captured, self._joint = captured, captured.joint
        self._given = own_inputs(captured)
        self._fx = fx.Graph()
        self._nodes: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]
        self._storages: list[dict[StorageKey, torch.UntypedStorage]] = [{} for _ in range(count)]
        self._fixed = {key for n in self._joint.primals if n not in self._given for key in storages(n)}
        """Storages that all micro-batches share."""

    def build(self) -> CapturedStep:
        captured = self._captured
        order = list(self._order())
        self._copy_nodes()
        losses = [nodes[captured.loss] for nodes in self._nodes]
        output = self._fx.output(tuple(losses))
        output.meta = {"desc": [None] * len(losses)}
        # The joint graph of all, with the inputs of all.
        joint = copy(self._joint)
        joint.module = LazyGraphModule(self._joint.module, self._fx)
        gone = set() if self._sums_stay else self._sums
        given = [n for n in self._joint.primals if gone.isdisjoint(self._tensors_of(n))]
        joint.primals = [self._nodes[0][n] for n in given]
        joint.primals += (nodes[n] for nodes in self._nodes[1:] for n in self._given)
        joint.gradients = {self._nodes[0][of]: self._nodes[0][made] for of, made in self._joint.gradients.items()}
        joint.roots = {
            self._key(key, number): [nodes[root] for root in roots]
            for number, nodes in enumerate(self._nodes)
            for key, roots in self._joint.roots.items()
            if (number == 0 or key in self._storages[number]) and all(root in nodes for root in roots)
        }
        tensor_of = {
            self._key(key, number): ids.get(tensor, tensor)
            for number, ids in enumerate(self._ids)
            for key, tensor in captured.tensor_of.items()
        }
        # A sum begins as the first gradient, and is no input.
        for op in captured.graph.ops:
            if op.name == ACCUMULATE and not self._sums_stay:
                begun = self._nodes[0][captured.nodes[op.id]]
                joint.roots[storages(begun)[0]] = [begun]
        nodes = {
            new: self._nodes[number][captured.nodes[op.id]]
            for new, (op, number) in enumerate(order)
            if op.id in captured.nodes
        }
        loss, *others = losses
        return CapturedStep(
            self.graph(), joint, nodes, tensor_of, loss, tuple(others), captured.updates, micro_batches=self._count
        )

    def _tensors_of(self, node: fx.Node) -> list[int]:
        return [self._captured.tensor_of[key] for key in storages(node) if key in self._captured.tensor_of]

    def _copy_nodes(self) -> None:
        """Copy each node for each micro-batch, with storages of its own; nodes of the update once."""
        captured = self._captured
        ops = {node: captured.graph.ops[op] for op, node in captured.nodes.items()}
        once = {node for node, op in ops.items() if op.phase is Phase.UPDATE}
        for node in self._joint.module.graph.nodes:
            if node.op == "output":
                continue
            shared = node.op in ("placeholder", "get_attr") and node not in self._given
            if shared or node in once or not once.isdisjoint(node.all_input_nodes):
                once |= {node} - ({node} if shared else set())
                self._copy(node, 0)
                for nodes in self._nodes[1:]:
                    nodes[node] = self._nodes[0][node]
                continue
            for number in range(self._count):
                if node in ops and ops[node].name == ACCUMULATE:
                    self._add_up(node, number)
                else:
                    self._copy(node, number)

    def _copy(self, node: fx.Node, number: int) -> fx.Node:
        new = self._fx.node_copy(node, self._nodes[number].__getitem__)
        new.meta = dict(node.meta)
        if number and "val" in node.meta:
            new.meta["val"] = tree_map_only(Tensor, lambda value: self._own(value, number), node.meta["val"])
        self._nodes[number][node] = new
        return new

    def _add_up(self, node: fx.Node, number: int) -> None:
        """Begin a sum with the first gradient, or add the next one to it."""
        total, gradient = node.args
        nodes = self._nodes[number]
        if number:
            nodes[node] = self._fx.call_function(_add, (nodes[total], nodes[gradient]))
            nodes[node].meta = {"val": None}
            return
        if self._sums_stay:
            self._copy(node, number)
            return
        value = total.meta["val"]
        begun = self._fx.call_function(_begun_like(value), (nodes[gradient],))
        begun.meta = {"val": value}
        nodes[node] = begun
        for of in self._nodes:
            of[total] = begun

    def _own(self, value: Tensor, number: int) -> Tensor:
        """Return a fake tensor like `value` in the storage that micro-batch `number` has in place of its own."""
        key = storage_key(value)
        if key in self._fixed or not isinstance(value, FakeTensor):
            return value
        storages = self._storages[number]
        if key not in storages:
            storages[key] = torch.UntypedStorage(value.untyped_storage().nbytes(), device="meta")
        # Made without a fake mode, at a hundredth of the time.
        made = torch.empty(0, dtype=value.dtype, device="meta")
        made.set_(storages[key], value.storage_offset(), value.shape, value.stride())
        return FakeTensor(value.fake_mode, made, value.device)

    def _key(self, key: StorageKey, number: int) -> StorageKey:
        own = self._storages[number].get(key)
        return key if own is None else key_of(own)


def _begun_like(total: Tensor) -> Any:
    shape, strides, dtype = total.shape, total.stride(), total.dtype

    def begin_sum(gradient: Tensor) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=gradient.device).copy_(gradient)

    return begin_sum


def _add(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)


def _block(layer: str) -> str:
    """Return the path of the first repeated block that a layer is in, or the layer's own."""
    found = _NUMBERED.match(layer)
    return found[0] if found else layer


def _runs(ops: Iterable[Op], places: Mapping[str, int], *, ascending: bool) -> Sequence[list[Op]]:
    """Return the ops in runs of one block each, which begin where the next block begins."""
    runs: list[list[Op]] = [[]]
    now: int | None = None
    for op in ops:
        place = places.get(_block(op.layer))
        if place is not None and now is not None and (place > now if ascending else place < now):
            runs.append([])
            now = place
        now = place if now is None else now
        runs[-1].append(op)
    return runs
