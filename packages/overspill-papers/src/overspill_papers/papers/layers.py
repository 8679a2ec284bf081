"""A step layer by layer: memory and time, as in plots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from overspill.core import Graph, LayerType, Op, Phase, TensorKind, Verb

from .run import PolicyRun

WEIGHTS = (TensorKind.PARAMETER, TensorKind.BUFFER)
LABELS = {LayerType.CONV: "CONV", LayerType.LINEAR: "FC", LayerType.POOL: "POOL"}


def weighted(graph: Graph, kinds: Iterable[LayerType] = (LayerType.CONV, LayerType.LINEAR)) -> dict[str, list[Op]]:
    """Return the ops of each layer of these kinds, by names such as CONV_01, in the order of forward."""
    kinds = tuple(kinds)
    found: dict[str, list[Op]] = {}
    count: dict[LayerType, int] = defaultdict(int)
    for op in graph.ops:
        if op.phase is Phase.FORWARD and op.layer_type in kinds:
            count[op.layer_type] += 1
            name = f"{LABELS[op.layer_type]}_{count[op.layer_type]:02}"
            found[name] = [
                other for other in graph.ops if other.layer == op.layer and other.layer_type is op.layer_type
            ]
    return found


def bytes_of(graph: Graph, op: Op) -> tuple[int, int, int]:
    """Return the bytes of maps, weights and workspace that `op` works with."""
    touched = [graph.tensors[t] for t in dict.fromkeys(op.reads + op.writes)]
    weights = sum(t.nbytes for t in touched if t.kind in (*WEIGHTS, TensorKind.GRADIENT))
    kept = (TensorKind.GRADIENT, TensorKind.INPUT)
    maps = sum(t.nbytes for t in touched if t.kind is TensorKind.INPUT or not (t.persistent or t.kind in kept))
    return maps, weights, op.workspace_bytes


def most_at_once(graph: Graph) -> int:
    """Return the most bytes that any layer needs at once in one pass (vDNN, Fig. 1)."""
    return max(sum(bytes_of(graph, op)) for op in graph.ops if op.phase is not Phase.UPDATE)


def spans(run: PolicyRun) -> Mapping[int, tuple[float, float]]:
    """Return the start and end of each op, in seconds."""
    return {e.target: (e.start_seconds, e.end_seconds) for e in run.timeline.events if e.verb is Verb.RUN}


def bytes_by_kind(graph: Graph) -> dict[str, int]:
    """Return network-wide bytes by the kinds of vDNN's Fig. 4 and Dymem's Fig. 1."""

    def held(*kinds: TensorKind) -> int:
        return sum(t.nbytes for t in graph.tensors if t.kind in kinds)

    gradient_maps = [
        t.nbytes
        for t in graph.tensors
        if t.kind is TensorKind.TEMPORARY
        and t.id in graph.producer
        and graph.ops[graph.producer[t.id]].phase is Phase.BACKWARD
    ]
    return {
        "weights": held(*WEIGHTS, TensorKind.GRADIENT),
        "feature maps": held(TensorKind.ACTIVATION, TensorKind.INPUT),
        "gradient maps": 2 * max(gradient_maps, default=0),
        "workspace": max((op.workspace_bytes for op in graph.ops), default=0),
    }


def maps_by_layer(graph: Graph) -> dict[LayerType, int]:
    """Return the bytes of activations by the type of the layer that makes them."""
    found: dict[LayerType, int] = defaultdict(int)
    for tensor in graph.tensors:
        if tensor.kind is TensorKind.ACTIVATION and tensor.id in graph.producer:
            found[graph.ops[graph.producer[tensor.id]].layer_type] += tensor.nbytes
    return dict(found)
