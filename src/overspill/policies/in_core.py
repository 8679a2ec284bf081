"""`in-core`, `liveness` and `oracle`: no transfers, and no recomputation but the program's own."""

from __future__ import annotations

from overspill.core import Device, Graph, Phase, Schedule, TensorKind
from overspill.planning.assemble import assemble
from overspill.planning.step_program import StepProgram

from .base import Policy


class InCore(Policy):
    """Keep every feature map until backward ends; free gradient maps at their last use.

    It is network-wide allocation with shared gradient maps: the baseline of vDNN (MICRO'16, §II-C and §IV-A), and the
    behaviour of Torch and Caffe.
    """

    name = "in-core"
    summary = "keep every feature map on the device to the end of backward"
    source = "vDNN §II-C, §IV-A (baseline)"

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        feature_maps = [t.id for t in graph.tensors if t.kind is TensorKind.ACTIVATION]
        return assemble(StepProgram(graph), (), self.name, budget_bytes, held=feature_maps)


class Liveness(Policy):
    """Free every tensor at its last use, as autograd does.

    It takes the least memory without swaps or recomputation, except for the program's own checkpoints: these are
    recomputed in backward.
    """

    name = "liveness"
    summary = "free every tensor at its last use, as autograd does"
    source = "SuperNeurons (PPoPP'18) §3.2; vDNN §III-A"

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        program = StepProgram(graph, checkpointed(graph), kept=given_to_checkpoints(graph))
        return assemble(program, (), self.name, budget_bytes)


def checkpointed(graph: Graph) -> list[int]:
    """Return the tensors that the program itself drops in forward and makes again.

    They are recomputable feature maps that its own checkpoints drop, if used in one checkpoint alone, and parameters
    that it gathers again.
    """
    # Checkpoints in which each tensor is read.
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
        if op.collective is not None
        or (
            graph.tensors[tensor].kind is TensorKind.ACTIVATION
            and graph.producer[tensor] == op.id
            and tensor not in graph.outputs
            and reads.get(tensor, set()) == {op.checkpoint}
        )
    ]


def given_to_checkpoints(graph: Graph) -> frozenset[int]:
    """Return the tensors that the program's own checkpoints read from outside, which they keep."""
    inside = {t: op.checkpoint for op in graph.ops if op.checkpoint for t in op.recompute_writes}
    return frozenset(
        t
        for op in graph.ops
        if op.checkpoint and op.collective is None
        for t in op.recompute_reads
        if inside.get(t) != op.checkpoint and not graph.is_gathered(t)
    )


class Oracle(Liveness):
    """Unlimited memory and the fastest algorithms; tensors are kept while needed.

    It is vDNN's oracular baseline, against which slowdowns are measured. Its peak may be over any budget.
    """

    name = "oracle"
    summary = "unlimited memory and the fastest algorithms: the time to measure others against"
    source = "vDNN §IV-A, §V (oracular baseline)"
    unlimited = True

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        return assemble(StepProgram(graph), (), self.name, budget_bytes)
