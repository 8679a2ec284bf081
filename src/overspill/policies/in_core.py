"""`in-core`, `liveness` and `oracle`: no transfer, no recomputation."""

from __future__ import annotations

from overspill.core import Device, Graph, Phase, Schedule, TensorKind
from overspill.planning.assemble import assemble
from overspill.planning.step_program import StepProgram

from .base import Policy


class InCore(Policy):
    """Every feature map stays from its making to the end of backward; gradient maps are freed at their last use.

    Network-wide allocation with shared gradient maps, the baseline of vDNN (MICRO'16, §II-C and §IV-A) and what
    Torch and Caffe did.
    """

    name = "in-core"
    summary = "keep every feature map on the device to the end of backward"
    source = "vDNN §II-C, §IV-A (baseline)"

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        feature_maps = [t.id for t in graph.tensors if t.kind is TensorKind.ACTIVATION]
        return assemble(StepProgram(graph), (), self.name, budget_bytes, held=feature_maps)


class Liveness(Policy):
    """Every tensor is freed at its last use: what autograd does, and the least memory without moving or recomputing.

    What the program's own checkpoints compute again in backward, they do here.
    """

    name = "liveness"
    summary = "free every tensor at its last use, as autograd does"
    source = "SuperNeurons (PPoPP'18) §3.2; vDNN §III-A"

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        return assemble(StepProgram(graph, checkpointed(graph)), (), self.name, budget_bytes)


def checkpointed(graph: Graph) -> list[int]:
    """What the program's own checkpoints drop in forward: feature maps that are used in one alone, and can be made again."""
    reads: dict[int, set[int]] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            for tensor in op.reads:
                reads.setdefault(tensor, set()).add(op.checkpoint)
    return [
        tensor
        for op in graph.ops
        if op.checkpoint
        for tensor in op.recompute_writes
        if graph.tensors[tensor].kind is TensorKind.ACTIVATION
        and graph.producer[tensor] == op.id
        and tensor not in graph.outputs
        and reads.get(tensor, set()) == {op.checkpoint}
    ]


class Oracle(Liveness):
    """What a device with enough memory would do: the fastest algorithms, everything kept while it is needed.

    vDNN's oracular baseline, against which slowdowns are measured; its peak may be over any budget.
    """

    name = "oracle"
    summary = "unlimited memory and the fastest algorithms: the time to measure others against"
    source = "vDNN §IV-A, §V (oracular baseline)"
    unlimited = True

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        return assemble(StepProgram(graph), (), self.name, budget_bytes)
