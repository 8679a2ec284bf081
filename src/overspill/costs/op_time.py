"""Op times: a roofline model, or measured times where known."""

from __future__ import annotations

from dataclasses import dataclass, field

from overspill.core import Device, Graph, Op
from overspill.core.saved import Saved

from .collective import collective_seconds
from .convolution import fastest_seconds
from .precision import peak_flops_per_second


@dataclass(frozen=True)
class MeasuredTimes(Saved):
    """Measured seconds by op signature on `device`; `signature` makes the keys."""

    device: str
    seconds: dict[str, float] = field(default_factory=dict)


def signature(graph: Graph, op: Op) -> str:
    """Return a key equal for ops that do the same work.

    It holds the name, and the shape and dtype of all tensors read and written.
    """

    def spell(tensors: tuple[int, ...]) -> str:
        return ",".join(f"{graph.tensors[t].dtype}{list(graph.tensors[t].shape)}" for t in tensors)

    return f"{op.name}({spell(op.reads)})->{spell(op.writes)}"


def op_seconds(graph: Graph, device: Device, measured: MeasuredTimes | None = None) -> tuple[float, ...]:
    """Return the seconds of each op of `graph` on `device`: measured, otherwise by the roofline.

    The roofline is Williams et al. 2009: the larger of two times, plus a fixed cost per op. One is FLOPs over the
    dtype's FLOP/s, times the share of it that the layer type reaches. The other is bytes moved over memory bandwidth. A
    collective takes the time of its ring. A convolution with several algorithms takes the time of its fastest.
    """
    known = measured.seconds if measured is not None and measured.device == device.name else {}
    return tuple(_seconds(graph, op, device, known) for op in graph.ops)


def _seconds(graph: Graph, op: Op, device: Device, known: dict[str, float]) -> float:
    if known and (seconds := known.get(signature(graph, op))) is not None:
        return seconds
    if op.collective is not None:
        return device.op_overhead_seconds + collective_seconds(op.collective, device)
    if not op.flops and not op.moved_bytes:
        return device.op_overhead_seconds
    if op.algorithms and (chosen := fastest_seconds(graph, op, device)) is not None:
        return device.op_overhead_seconds + chosen
    dtype = graph.tensors[op.writes[0]].dtype if op.writes else "float32"
    rate = peak_flops_per_second(device, dtype, op.layer_type)
    compute = op.flops / (rate * device.efficiency.get(op.layer_type, 1.0))
    return device.op_overhead_seconds + max(compute, op.moved_bytes / device.memory_bytes_per_second)
