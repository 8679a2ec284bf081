"""Run row-wise ops in pieces of rows, so that their temporaries have the size of a piece.

A *chain* is a connected group of row-wise nodes over the same rows. They are casts and other pointwise ops, softmax
within a row, the loss of a classifier and its gradient. No other node reads its inner results. The chain's nodes of
forward, and those of backward, become unrolled loops over pieces. A loop has slices of the chain's inputs, the same
nodes on them, and copies into slices of the results that others read. Backward computes the results of the chain's
forward that it reads again, piece by piece. Pieces are ordinary nodes: plans, checks and lowering know nothing of them.

Each row sees the same kernel on the same numbers, and so has the same bits. An op is here only if its kernels give a
row the same bits at any place (`tests/capture/compiled/test_pieces.py`). On CUDA the way softmax sums a row depends on
the row's alignment. So pieces begin where rows are aligned as in the whole (`ALIGNED_BYTES`; PyTorch 2.13,
aten/src/ATen/native/cuda/PersistentSoftmax.cuh, SoftMax.cu). On the CPU a vectorised function may round differently
from the scalar one that computes the end of a loop. So there only pointwise ops that IEEE 754 rounds exactly are split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import gcd, lcm, prod
from typing import Any

import torch
from torch import Tensor, fx

from overspill.capture.fake_cuda.attention import CAPABILITY
from overspill.pytorch.schemas import arguments, node_argument

from .joint import JointGraph, copied, is_repeatable, storage_bytes

aten = torch.ops.aten

EXACT = frozenset({
    aten._to_copy.default, aten.clone.default, aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.mul.Tensor,
    aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.abs.default, aten.relu.default,
    aten.threshold_backward.default, aten.maximum.default, aten.minimum.default, aten.clamp.default,
    aten.clamp_min.default, aten.clamp_max.default, aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor,
    aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar, aten.lt.Scalar, aten.logical_and.default, aten.logical_or.default,
    aten.logical_not.default,
})  # fmt: skip
"""Pointwise ops whose result does not depend on an element's place in memory, on any device."""
SOFTMAX = {
    **dict.fromkeys((aten._log_softmax.default, aten._softmax.default), ("self",)),
    **dict.fromkeys(
        (aten._log_softmax_backward_data.default, aten._softmax_backward_data.default), ("grad_output", "output")
    ),
}
"""Softmax and its gradient: the arguments that have rows."""
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.detach.default, aten.alias.default})
"""Views that a chain may contain; rows stay what they are."""
LOSS, LOSS_GRADIENT = aten.nll_loss_forward.default, aten.nll_loss_backward.default
IGNORED = -100
"""The `ignore_index` of the loss over picked numbers."""

ALIGNED_BYTES = 16
"""The largest access of CUDA's softmax kernels."""
SHARE = 8
"""A piece's temporaries are at most one SHARE-th of the bytes that the chain reads and writes."""
WORTH = 4
"""A chain is split if its largest op needs at least one WORTH-th of the bytes that the step's largest op needs."""


def in_pieces(joint: JointGraph) -> JointGraph | None:
    """Return the same step with its large chains in pieces of rows, or None if no chain is worth it.

    `joint` stays unchanged.
    """
    module = copied(joint.module)
    again = JointGraph(module, len(joint.forward_outputs))
    least = _largest_need(again) // WORTH
    done = False
    taken: set[fx.Node] = set()
    for seed in sorted(_ops(again), key=_need, reverse=True):
        if _need(seed) < max(least, 1):
            break
        if seed not in taken and (chain := _Chain.around(again, seed, taken)) is not None:
            taken |= chain.nodes
            done |= chain.split()
    if not done:
        return None
    module.graph.lint()
    return JointGraph(module, len(joint.forward_outputs))


def _ops(joint: JointGraph) -> list[fx.Node]:
    return [n for n in (*joint.forward, *joint.backward) if joint.is_op(n)]


def _need(node: fx.Node) -> int:
    """Return the bytes of all storages that a node reads and makes."""
    found: dict[int, int] = {}
    for n in (node, *node.all_input_nodes):
        found.update(storage_bytes(n))
    return sum(found.values())


def _largest_need(joint: JointGraph) -> int:
    return max(map(_need, _ops(joint)), default=0)


def _nbytes(node: fx.Node) -> int:
    """Return the bytes of the elements of a result that is one tensor."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _lead(shape: Sequence[int], rows: int) -> int:
    """Return how many leading dimensions count `rows`; 0 if no number of them does."""
    return next((count for count in range(1, len(shape) + 1) if prod(shape[:count]) == rows), 0)


def _has_rows(node: fx.Node, rows: int) -> bool:
    return isinstance(value := node.meta.get("val"), Tensor) and _lead(value.shape, rows) > 0


def _rows_of(node: fx.Node) -> int:
    """Return the number of rows of a seed.

    For softmax and a loss they are the elements of all dimensions before the one reduced, for others of all but the
    last.
    """
    value = node_argument(node, "self").meta["val"] if node.target is LOSS else node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    ends = node_argument(node, "dim") % max(value.dim(), 1) if node.target in SOFTMAX else -1
    return prod(value.shape[:ends]) if value.dim() > 1 else 0


def _is_row_wise(node: fx.Node, rows: int) -> bool:
    """Return whether each row of the result follows from the same row of inputs with rows, and all of the others."""
    value = node.meta.get("val")
    if rows < 2 or node.op != "call_function":
        return False
    if node.target is LOSS:
        scores = node_argument(node, "self").meta["val"]
        return node_argument(node, "weight") is None and scores.shape[:-1] == (rows,)
    if not isinstance(value, Tensor) or not (lead := _lead(value.shape, rows)):
        return False
    if node.target in SOFTMAX:
        return bool(node_argument(node, "dim") % value.dim() >= lead)
    if node.target in VIEWS:
        return _has_rows(node.args[0], rows)
    inputs = [source.meta.get("val") for source in node.all_input_nodes]
    return (node.target is LOSS_GRADIENT and value.dim() == 2 and lead == 1) or (
        _is_pointwise(node)
        and all(isinstance(v, Tensor) and _alike(v.shape, value.shape, lead, rows) is not None for v in inputs)
    )


def _is_pointwise(node: fx.Node) -> bool:
    target, kept = node.target, (None, torch.preserve_format, torch.contiguous_format)
    if node.kwargs.get("memory_format") not in kept or not is_repeatable(node):
        return False
    on_cpu = node.meta["val"].device.type == "cpu" and not CAPABILITY.get()
    return target in EXACT or (not on_cpu and torch.Tag.pointwise in target.tags)


def _alike(shape: Sequence[int], result: Sequence[int], lead: int, rows: int) -> bool | None:
    """Return whether an input of a pointwise op has the result's rows (True) or none (False); None if it has some."""
    aligned = [1] * (len(result) - len(shape)) + list(shape)
    pairs = [(mine, whole) for mine, whole in zip(aligned[:lead], result[:lead], strict=True) if whole != 1]
    if all(mine == 1 for mine, _ in pairs):
        return False
    as_rows = all(mine == whole for mine, whole in pairs)
    return True if as_rows and len(shape) - _lead(shape, rows) == len(result) - lead else None


def _row_inputs(node: fx.Node, rows: int) -> list[fx.Node]:
    """Return the inputs of a row-wise node that have its rows."""
    if node.target is LOSS:
        return [node_argument(node, name) for name in ("self", "target")]
    if node.target is LOSS_GRADIENT:
        inputs = (node_argument(node, name) for name in ("grad_output", "self", "target"))
        return [n for n in inputs if n.meta["val"].dim()]
    if node.target in SOFTMAX:
        return [node_argument(node, name) for name in SOFTMAX[node.target]]
    value = node.meta["val"]
    lead = _lead(value.shape, rows)
    return [
        n for n in node.all_input_nodes if node.target in VIEWS or _alike(n.meta["val"].shape, value.shape, lead, rows)
    ]


def _is_cut(node: fx.Node, rows: int) -> bool:
    """Return whether pieces of rows of an input are views of it."""
    value = node.meta["val"]
    lead = _lead(value.shape, rows)
    steps = [(n, step) for n, step in zip(value.shape[:lead], value.stride()[:lead], strict=True) if n > 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(steps))


def _only_casts(node: fx.Node) -> bool:
    """Return whether a copy of the input into another dtype gives the same result."""
    return node.target is aten._to_copy.default


class _Chain:
    """A chain of `joint`: `nodes` over the same `rows`, including views."""

    def __init__(self, joint: JointGraph, rows: int, nodes: set[fx.Node]) -> None:
        self.joint = joint
        self.graph = joint.module.graph
        self.rows = rows
        self.nodes = nodes

    @classmethod
    def around(cls, joint: JointGraph, seed: fx.Node, taken: set[fx.Node]) -> _Chain | None:
        """Return the largest chain with `seed`, or None if it is in none."""
        if not _is_row_wise(seed, rows := _rows_of(seed)):
            return None
        live = set(joint.forward) | set(joint.backward)
        found, pending = {seed}, [seed]
        while pending:
            node = pending.pop()
            for near in (*node.all_input_nodes, *node.users):
                if near in live and near not in taken and near not in found and _is_row_wise(near, rows):
                    found.add(near)
                    pending.append(near)
        chain = cls(joint, rows, found)
        return chain if chain._narrowed(seed) else None

    def _narrowed(self, seed: fx.Node) -> bool:
        """Take out the nodes that do not fit; return whether a chain with `seed` is left."""
        while out := [n for n in self.nodes if not self._fits(n)]:
            self.nodes.difference_update(out)
        # What is left may have fallen apart.
        near, pending = set(), [seed] if seed in self.nodes else []
        while pending:
            if (node := pending.pop()) in self.nodes and node not in near:
                near.add(node)
                pending += [*node.all_input_nodes, *node.users]
        self.nodes = near
        return bool(near)

    def _fits(self, node: fx.Node) -> bool:
        """Return whether `node` may be in the chain as it is now."""
        # Inner results have no other reader; what others read is made whole.
        if node.target is not LOSS and not all(user in self.nodes for user in node.users):
            has_inner = any(user in self.nodes for user in node.users)
            if has_inner or node.target in VIEWS or not node.meta["val"].is_contiguous():
                return False
        cut = _row_inputs(node, self.rows)
        return all(
            (source in cut) if source in self.nodes else (source not in cut or _is_cut(source, self.rows))
            for source in node.all_input_nodes
        )

    def split(self) -> bool:
        """Put the chain's parts of forward and backward in pieces; return whether any was."""
        order = {node: position for position, node in enumerate(self.graph.nodes)}
        backward = self.joint.backward_set
        done = False
        for is_backward in (False, True):
            ends = [n for n in self.nodes if (n in backward) is is_backward and self._is_end(n)]
            part = sorted(self._behind(ends), key=order.__getitem__)
            if ends and _ChainPart(self, part, ends, order, is_backward).split():
                done = True
        for node in sorted(self.nodes, key=order.__getitem__, reverse=True):
            if not node.users:
                self.graph.erase_node(node)
        return done

    def _is_end(self, node: fx.Node) -> bool:
        return node.target is LOSS or any(user not in self.nodes for user in node.users)

    def _behind(self, ends: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the nodes of the chain that `ends` follow from, including `ends`."""
        found: set[fx.Node] = set()
        pending = list(ends)
        while pending:
            if (node := pending.pop()) in self.nodes and node not in found:
                found.add(node)
                pending += _row_inputs(node, self.rows)
        return found


class _ChainPart:
    """The nodes of a chain that run in forward or in backward, in order, with the `ends` that others read."""

    def __init__(
        self,
        chain: _Chain,
        nodes: Sequence[fx.Node],
        ends: Sequence[fx.Node],
        order: dict[fx.Node, int],
        is_backward: bool,
    ) -> None:
        self.chain = chain
        self.rows = chain.rows
        self.graph = chain.graph
        self.nodes = nodes
        self.ends = ends
        self.order = order
        self.tag = "is_backward" if is_backward else "is_forward"
        self.inner = [n for n in nodes if n not in ends or n.target is LOSS]
        self.again = [n for n in nodes if is_backward and n not in chain.joint.backward_set]
        ops = [n for n in self.inner if chain.joint.is_op(n) and n.target is not LOSS]
        self.temporary_bytes = sum(_nbytes(n) for n in ops)
        self.inputs = {s for n in nodes for s in n.all_input_nodes if s not in nodes}
        self.kept_bytes = sum(map(_nbytes, self.inputs)) + sum(_nbytes(n) for n in ends if n.target is not LOSS)

    def split(self) -> bool:
        """Replace the part by pieces, if they take less memory; return whether it did."""
        size = self._size()
        if size >= self.rows or not all(is_repeatable(n) or n.target in VIEWS for n in self.again):
            return False
        # A loop stands where all inputs are there, and no end has been read.
        last = max(self.order[n] for n in (*self.inputs, *(n for n in self.nodes if n not in self.again)))
        if any(self.order[user] <= last for end in self.ends for user in end.users if user not in self.nodes):
            return False
        at = next(n for n, position in self.order.items() if position == last)
        # Forward's results could not be computed again in backward: only where they are small.
        ends = sum(_nbytes(n) for n in self.ends if n.target is not LOSS)
        if self.tag == "is_forward" and ends * SHARE > self.temporary_bytes:
            return False
        _RowLoop(self, at.next, size).unroll()
        return True

    def _size(self) -> int:
        """Return the number of rows of a piece."""
        pieces = -(-self.temporary_bytes * SHARE // max(self.kept_bytes, 1))
        step = lcm(*(_alignment(n, self.rows) for n in (*self.nodes, *self.inputs) if _has_rows(n, self.rows)))
        size = -(-self.rows // max(pieces, 1))
        return -(-size // step) * step


def _alignment(node: fx.Node, rows: int) -> int:
    """Return the smallest number of rows whose bytes are a multiple of `ALIGNED_BYTES`."""
    return ALIGNED_BYTES // gcd(ALIGNED_BYTES, _nbytes(node) // rows)


class _RowLoop:
    """The unrolled loop over pieces of one part, in front of node `at`."""

    def __init__(self, part: _ChainPart, at: fx.Node, size: int) -> None:
        self.part = part
        self.graph = part.graph
        self.rows = part.rows
        self.at = at
        self.size = size
        self.mode = next(n.meta["val"] for n in part.nodes if isinstance(n.meta["val"], Tensor)).fake_mode
        self.flat: dict[fx.Node, fx.Node] = {}
        self.results: dict[fx.Node, fx.Node] = {}
        self.targets: dict[fx.Node, fx.Node] = {}

    def unroll(self) -> None:
        part = self.part
        with self.graph.inserting_before(self.at):
            for end in part.ends:
                like = (node_argument(end, "self") if end.target is LOSS else end).meta["val"]
                shape = [self.rows, 1] if end.target is LOSS else list(like.shape)
                made = {"dtype": like.dtype, "device": like.device}
                self.results[end] = self._call(aten.empty.memory_format, (shape,), made, end)
                if end.target is not LOSS:
                    self.results[end].meta["val"] = end.meta["val"]  # of which readers have views
                else:
                    self.targets[end] = self._targets(end)
            for start in range(0, self.rows, self.size):
                self._piece(start, min(start + self.size, self.rows))
            for end in part.ends:
                new = self.results[end]
                if end.target is LOSS:
                    new = self._loss(end, new)
                end.replace_all_uses_with(new, delete_user_cb=lambda user: user not in part.chain.nodes)

    def _piece(self, start: int, stop: int) -> None:
        values: dict[fx.Node, Any] = {}

        def of(source: fx.Node, reader: fx.Node) -> fx.Node:
            if source in values:
                return values[source]
            if source in _row_inputs(reader, self.rows):
                values[source] = self._slice(self._flat(source, source), start, stop, reader)
                return values[source]
            return self._rowless(source, reader)

        for node in self.part.nodes:
            if node.target is LOSS:
                scores, targets = (
                    of(node_argument(node, "self"), node),
                    self._slice(self.targets[node], start, stop, node),
                )
                made = self._call(aten.gather.default, (scores, 1, targets), {}, node)
            elif node.target in VIEWS:
                source = of(node.args[0], node)
                shape = self._shape(node, stop - start)
                same = tuple(source.meta["val"].shape) == tuple(shape)
                values[node] = source if same else self._call(aten.view.default, (source, shape), {}, node)
                continue
            elif node in self.part.ends and _only_casts(node):
                made = of(node.args[0], node)  # the copy casts
            else:
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: of(n, node))  # noqa: B023
                if node.target in SOFTMAX:
                    value = node.meta["val"]
                    dim = node_argument(node, "dim") % value.dim() - _lead(value.shape, self.rows) + 1
                    args, kwargs = tuple((arguments(node.target, args, kwargs) | {"dim": dim}).values()), {}
                made = self._call(node.target, args, kwargs, node)
            values[node] = made
            if node in self.part.ends:
                into = self._slice(self._flat(self.results[node], node), start, stop, node)
                self._call(aten.copy_.default, (into, made), {}, node)

    def _shape(self, node: fx.Node, rows: int) -> list[int]:
        shape = node.meta["val"].shape
        return [rows, *shape[_lead(shape, self.rows) :]]

    def _flat(self, node: fx.Node, of: fx.Node) -> fx.Node:
        """Return a view of `node` with one dimension of rows."""
        if node not in self.flat:
            value = node.meta["val"]
            shape = [self.rows, *value.shape[_lead(value.shape, self.rows) :]]
            same = tuple(shape) == tuple(value.shape)
            self.flat[node] = node if same else self._call(aten.view.default, (node, shape), {}, of)
        return self.flat[node]

    def _rowless(self, source: fx.Node, reader: fx.Node) -> fx.Node:
        """Return an input that all rows read, with no more dimensions than a row has."""
        value, rest = source.meta["val"], len(self._shape(reader, 1)) - 1
        if reader.target not in SOFTMAX and reader.target is not LOSS_GRADIENT and value.dim() > rest:
            return self._call(aten.view.default, (source, list(value.shape[value.dim() - rest :])), {}, reader)
        return source

    def _slice(self, node: fx.Node, start: int, stop: int, of: fx.Node) -> fx.Node:
        return self._call(aten.slice.Tensor, (node, 0, start, stop), {}, of)

    def _targets(self, loss: fx.Node) -> fx.Node:
        """Return the classes to pick, of shape [rows, 1]; class 0 for rows that are ignored."""
        given, ignored = node_argument(loss, "target"), node_argument(loss, "ignore_index")
        mask = self._call(aten.eq.Scalar, (given, ignored), {}, loss)
        picked = self._call(aten.masked_fill.Scalar, (given, mask, 0), {}, loss)
        return self._call(aten.view.default, (picked, [self.rows, 1]), {}, loss)

    def _loss(self, loss: fx.Node, picked: fx.Node) -> fx.Node:
        """Return the loss over the picked numbers: the same kernel adds up the same numbers in the same order."""
        given, ignored = node_argument(loss, "target"), node_argument(loss, "ignore_index")
        mask = self._call(aten.eq.Scalar, (given, ignored), {}, loss)
        only = self._call(aten.zeros_like.default, (given,), {}, loss)
        classes = self._call(aten.masked_fill.Scalar, (only, mask, IGNORED), {}, loss)
        made = self._call(LOSS, (picked, classes, None, node_argument(loss, "reduction"), IGNORED), {}, loss)
        made.meta["val"] = loss.meta["val"]
        return made

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], of: fx.Node) -> fx.Node:
        """Return a new node in place of `of`, with its layer and lines."""
        node = self.graph.call_function(target, args, kwargs)
        given, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            value = target(*given, **named)
        node.meta = {**of.meta, "val": value, "partitioner_tag": self.part.tag}
        node.meta.pop("tensor_meta", None)
        return node
