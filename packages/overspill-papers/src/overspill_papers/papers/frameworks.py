"""The same step as the papers' frameworks run it.

These are Torch's layers over cuDNN, not PyTorch's ops. Four things differ:

- Activations are in place: Y takes the place of X, and dX of dY (vDNN, MICRO'16, footnote 1, after Caffe and Torch).
- Gradients that meet where the network forks are added to one of them, as Torch's ConcatTable does.
- Max pooling saves no index of each maximum: cuDNN's backward finds it again by X and Y, so Y stays.
- An overwritten tensor cannot be recomputed by its op alone, so such ops are not recomputable.

Batch norm keeps X and two statistics a channel, and dropout a mask of a byte a number, in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from overspill.core import Graph, LayerType, Op, Phase, Tensor, TensorKind

POOL, POOL_BACKWARD = "max_pool2d_with_indices", "max_pool2d_with_indices_backward"
SUM = "add"


def as_layers(graph: Graph) -> Graph:
    """Return `graph` with activations and sums of gradients in place, and pooling without indices."""
    return _in_place(_pooling_without_indices(graph))


def _pooling_without_indices(graph: Graph) -> Graph:
    """Return the graph in which every pooling's backward reads Y instead of the removed indices."""
    output_of: dict[int, int] = {}
    for op in graph.ops:
        if op.name == POOL and len(op.writes) == 2:
            made, indices = sorted(op.writes, key=lambda t: graph.tensors[t].dtype == "int64")
            readers = {graph.ops[reader].name for reader in graph.consumers[indices]}
            if readers <= {POOL_BACKWARD} and indices not in graph.outputs:
                output_of[indices] = made
    ops = tuple(_pooling(graph, op, output_of) for op in graph.ops)
    saved = {output_of[t] for op in ops if op.name == POOL_BACKWARD for t in graph.ops[op.id].reads if t in output_of}
    tensors = tuple(
        replace(t, kind=TensorKind.ACTIVATION) if t.id in saved and t.kind is TensorKind.TEMPORARY else t
        for t in graph.tensors
    )
    return _without(replace(graph, tensors=tensors, ops=ops), frozenset(output_of))


def _pooling(graph: Graph, op: Op, output_of: Mapping[int, int]) -> Op:
    indices = [t for t in (*op.reads, *op.writes) if t in output_of]
    if not indices:
        return op
    change = sum(graph.tensors[output_of[t]].nbytes for t in op.reads if t in output_of)
    change -= sum(graph.tensors[t].nbytes for t in indices)
    return replace(
        op,
        reads=tuple(dict.fromkeys(output_of.get(t, t) for t in op.reads)),
        writes=tuple(t for t in op.writes if t not in output_of),
        recompute_writes=tuple(t for t in op.recompute_writes if t not in output_of),
        moved_bytes=op.moved_bytes + change,
    )


def _in_place(graph: Graph) -> Graph:
    """Return the graph with activations and sums of gradients in place.

    They overwrite an input, X or dY, or a summand, that no other op reads.
    """
    takes_place: dict[int, int] = {}
    for op in graph.ops:
        gradients_meet = op.name == SUM and op.phase is Phase.BACKWARD
        if len(op.writes) == 1 and (gradients_meet or op.layer_type is LayerType.ACTIVATION):
            for source in op.reads:
                if source not in takes_place and _may_overwrite(graph, op, source):
                    takes_place[source] = op.writes[0]
                    break
    # Follow chains, so that each has one tensor.
    last = {source: _end(source, takes_place) for source in takes_place}
    overwritten = frozenset(last.values())

    def renamed(tensors: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(last.get(t, t) for t in tensors))

    ops = []
    for op in graph.ops:
        reads, writes = renamed(op.reads), renamed(op.writes)
        # An op cannot run again once its input is overwritten.
        if overwritten.isdisjoint(writes):
            ops.append(replace(op, reads=reads, writes=writes, recompute_reads=renamed(op.recompute_reads)))
        else:
            ops.append(
                replace(op, reads=reads, writes=writes, recomputable=False, recompute_reads=(), recompute_writes=())
            )
    return _without(replace(graph, ops=tuple(ops)), frozenset(last))


def _end(tensor: int, takes_place: Mapping[int, int]) -> int:
    """Return the last tensor in the place of `tensor`, after any chain of activations."""
    while tensor in takes_place:
        tensor = takes_place[tensor]
    return tensor


def _may_overwrite(graph: Graph, op: Op, source: int) -> bool:
    """Return whether `op` may write its result over `source`.

    `source` must have the same size and phase, and no other reader.
    """
    before, after = graph.tensors[source], graph.tensors[op.writes[0]]
    maker = graph.producer.get(source)
    return (
        maker is not None
        and not after.persistent
        and _alike(before, after)
        and graph.uses[source] == (maker, op.id)
        and graph.ops[maker].phase is op.phase is not Phase.UPDATE
        and not {source, after.id} & set(graph.outputs)
    )


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.nbytes == other.nbytes and one.dtype == other.dtype and one.movable == other.movable


def _without(graph: Graph, gone: frozenset[int]) -> Graph:
    """Return `graph` without the tensors `gone`, which no op uses. Ids are positions again."""
    kept = [t for t in graph.tensors if t.id not in gone]
    number = {tensor.id: position for position, tensor in enumerate(kept)}

    def ids(tensors: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number[t] for t in tensors)

    return replace(
        graph,
        tensors=tuple(replace(t, id=number[t.id]) for t in kept),
        ops=tuple(
            replace(
                op,
                reads=ids(op.reads),
                writes=ids(op.writes),
                recompute_reads=ids(op.recompute_reads),
                recompute_writes=ids(op.recompute_writes),
            )
            for op in graph.ops
        ),
        outputs=ids(graph.outputs),
    )
