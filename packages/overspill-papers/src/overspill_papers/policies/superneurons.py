"""`superneurons` and `superneurons-offload`: SuperNeurons (Wang et al., PPoPP'18, §3.2 to §3.4)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from overspill.core import Device, Graph, LayerType, Op, Phase, Schedule
from overspill.planning.assemble import assemble
from overspill.planning.fastest import fastest
from overspill.planning.floor import below, floor_of
from overspill.planning.gaps import earliest_return, may_swap
from overspill.planning.step_program import Gap, Positions, StepProgram
from overspill.planning.timing import where_memory_allows
from overspill.policies.base import Policy
from overspill_papers.planning.lru import evictions, smallest, transfers, without

EXPENSIVE = (LayerType.CONV, LayerType.LINEAR)
"""Layers that are not recomputed (§3.4); all others are cheap."""
BY_THE_WAY = 64
"""A layer's output that is so many times smaller than its input, as batch norm's statistics, is no activation."""
ROOM_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass
class RecomputeSegment:
    """The cheap layers between two expensive ones (§3.4): the result of `start`, and all that cheap layers make of it.

    The checkpoints are the saved tensors that `start` makes. Where its output is not saved because an activation
    follows, they are the first saved ones made of it. SuperNeurons' and vDNN's activations work in place, so theirs is
    the convolution's output.
    """

    start: Op
    join: bool
    checkpoints: list[int] = field(default_factory=list)
    """The tensors from which the others are recomputed."""
    dropped: list[int] = field(default_factory=list)
    """The saved tensors that can be recomputed."""
    made: list[int] = field(default_factory=list)
    """The dropped tensors and the intermediate ones that lead to them."""


class SuperneuronsOffload(Policy):
    """Offload outputs of convolutions if memory is short.

    It has liveness analysis (§3.2) and the Unified Tensor Pool (§3.3). An output's offload starts after its last use in
    forward, concurrently with the next layers (§3.3.1). The LRU Tensor Cache (§3.3.2, Alg. 2) decides which of them
    free their memory, and when: none while everything fits. In backward each checkpoint is fetched while the layers
    after the next one run, one convolution ahead (§3.3.1), or later if memory is short. The memory for fetches is tried
    in fixed shares.
    """

    name = "superneurons-offload"
    summary = "offload outputs of convolutions through an LRU cache, without recomputation"
    source = "SuperNeurons (PPoPP'18) §3.2, §3.3"
    offloads = True
    plans_for_budget = True

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        plain = StepProgram(graph)
        peak = int(plain.live_bytes().max(initial=0))
        if budget_bytes is None or peak <= budget_bytes:
            return assemble(plain, (), self.name, budget_bytes)
        segments = segments_of(graph)
        program = self._program(plain, segments)
        gaps = checkpoint_gaps(program, segments, joins=self.recomputes)
        best = fastest(graph, device, seconds, self._candidates(program, gaps, budget_bytes), budget_bytes)
        if best is None:
            live = program.live_bytes()
            floors = smallest(program, fetches(program, gaps, live), live), floor_of(plain, {})
            raise below(min(floors, key=lambda floor: floor.nbytes), budget_bytes, self.name)
        return best

    def _program(self, plain: StepProgram, segments: Sequence[RecomputeSegment]) -> StepProgram:  # noqa: ARG002
        return plain

    def _candidates(self, program: StepProgram, gaps: Sequence[Gap], budget_bytes: int) -> Iterator[Schedule]:
        live = program.live_bytes()
        tried: list[Mapping[Gap, int]] = []
        for fetched in fetches(program, gaps, live):
            if fetched in tried:
                continue
            tried.append(fetched)
            released = evictions(program, fetched, live, budget_bytes)
            if released is not None:
                yield assemble(program, transfers(program, fetched, released), self.name, budget_bytes)


class Superneurons(SuperneuronsOffload):
    """As `superneurons-offload`, with recomputation of cheap layers.

    Their outputs are dropped and recomputed in backward (§3.4), cost-aware, segment by segment. Speed-centric segments
    are recomputed once and kept for the segment's whole backward, if that stays within the most that any layer needs
    (l_peak). Otherwise a segment is memory-centric: recomputed for each backward layer. Where several segments meet (a
    residual sum, a concatenation), a new one begins and its tensor counts as a checkpoint. Its recomputation would take
    every branch's segment, in a residual net back to its first layer. Random layers are not recomputed. While the step
    fits without any of this, nothing is done.
    """

    name = "superneurons"
    summary = "offload outputs of convolutions through an LRU cache, recompute cheap layers"
    source = "SuperNeurons (PPoPP'18) §3.2 to §3.4"
    recomputes = True

    def _program(self, plain: StepProgram, segments: Sequence[RecomputeSegment]) -> StepProgram:
        graph = plain.graph
        most = layer_peak_bytes(graph)
        dropped = [t for segment in segments for t in segment.dropped]
        drop_after_use = [t for s in segments if speed_centric_bytes(graph, s) > most for t in s.made]
        return StepProgram(graph, dropped, drop_after_use=drop_after_use)


def segments_of(graph: Graph) -> list[RecomputeSegment]:
    """Return the segments of forward, in order.

    Tensors made of inputs and parameters alone belong to none.
    """
    found: list[RecomputeSegment] = []
    segment_of: dict[int, RecomputeSegment] = {}
    unsaved: set[int] = set()  # made by expensive layers, directly or by the way: making it again would be expensive
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            break
        sources = {id(segment_of[t]): segment_of[t] for t in op.reads if t in segment_of}
        cheap = op.layer_type not in EXPENSIVE and op.recomputable
        if cheap and not sources:
            continue
        # An expensive layer, or one that joins segments, begins a segment.
        begins = not cheap or len(sources) > 1
        segment = RecomputeSegment(op, join=cheap) if begins else next(iter(sources.values()))
        if begins:
            found.append(segment)
        again = begins or any(t in unsaved for t in op.reads)
        # Results of cheap layers may be recomputed, others are checkpoints.
        for tensor in op.writes:
            if graph.tensors[tensor].persistent:
                continue
            segment_of[tensor] = segment
            if not again:
                segment.made.append(tensor)
            elif graph.first_backward_use(tensor) is None:
                unsaved.add(tensor)
            else:
                segment.checkpoints.append(tensor)
    writers = [sum(t in graph.ops[op].writes for op in uses) for t, uses in enumerate(graph.uses)]
    for segment in found:
        segment.dropped = [t for t in segment.made if writers[t] == 1 and _droppable(graph, segment, t)]
    return found


def _droppable(graph: Graph, segment: RecomputeSegment, tensor: int) -> bool:
    """Return whether a cheap layer's result is worth dropping and can be recomputed.

    All checkpoints are still there when it is needed again.
    """
    op = graph.ops[graph.producer[tensor]]
    wanted = [use for use in graph.uses[tensor] if graph.ops[use].phase is not Phase.FORWARD]
    read_bytes = sum(graph.tensors[t].nbytes for t in op.recompute_reads)
    return (
        bool(wanted)
        and graph.may_recompute(tensor)
        and tensor not in graph.outputs
        and graph.tensors[tensor].nbytes * BY_THE_WAY >= read_bytes
        and all(graph.uses[checkpoint][-1] >= wanted[-1] for checkpoint in segment.checkpoints)
    )


def layer_peak_bytes(graph: Graph) -> int:
    """Return the most bytes that any layer needs in forward and backward, §3.4's l_peak = max(l_i)."""
    tensors = graph.tensors
    needs = [0]
    for layer in graph.layers.values():
        ops = [graph.ops[op] for op in layer if graph.ops[op].layer_type is not LayerType.UPDATE]
        touched = {t for op in ops for t in (*op.reads, *op.writes) if not tensors[t].persistent}
        needs.append(sum(tensors[t].nbytes for t in touched) + max((op.workspace_bytes for op in ops), default=0))
    return max(needs)


def speed_centric_bytes(graph: Graph, segment: RecomputeSegment) -> int:
    """Return the bytes of `segment` when recomputed at once, §3.4's memcost.

    They are of its forward and of its last layer's backward.
    """
    forward = set(segment.dropped)
    readers = {op for t in forward for op in graph.consumers[t] if graph.ops[op].phase is not Phase.FORWARD}
    last = graph.ops[min(readers)] if readers else segment.start  # backward begins with the last layer
    beside = {t for t in (*last.reads, *last.writes) if not graph.tensors[t].persistent} - forward
    return last.workspace_bytes + sum(graph.tensors[t].nbytes for t in forward | beside)


def checkpoint_gaps(program: StepProgram, segments: Sequence[RecomputeSegment], *, joins: bool) -> list[Gap]:
    """Return the gaps in which checkpoints may be off the device: those of convolutions, and of `joins` (§3.3)."""
    offered = {
        tensor
        for segment in segments
        if segment.start.layer_type is LayerType.CONV or (joins and segment.join)
        for tensor in segment.checkpoints
    }
    return [gap for gap in program.gaps if gap.tensor in offered and may_swap(program, gap)]


def fetches(program: StepProgram, gaps: Collection[Gap], live: Positions) -> Iterator[dict[Gap, int]]:
    """Yield the steps before which tensors return, one checkpoint ahead where the memory set aside for that suffices.

    The shares of memory do not depend on the budget, so a larger one has the same choices.
    """
    wanted = one_ahead(program, gaps)
    least = without(program, {gap: gap.end for gap in gaps}, live)
    low, high = int(least.max(initial=0)), int(live.max(initial=0))
    left = {gap: gap.start + 1 for gap in gaps}
    for share in ROOM_SHARES:
        yield where_memory_allows(program, wanted, least.copy(), low + int(share * (high - low)), left)


def one_ahead(program: StepProgram, gaps: Collection[Gap]) -> dict[Gap, int]:
    """Return the steps of prefetching each tensor one checkpoint ahead.

    Each is fetched when the checkpoint that is needed before it has arrived.
    """
    ends = sorted({gap.end for gap in gaps})
    before = dict(zip(ends, [0, *ends], strict=False))
    return {gap: min(max(before[gap.end], earliest_return(program, gap)), gap.end) for gap in gaps}
