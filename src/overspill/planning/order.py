"""Execution orders of ops: Dymem's depth-first order (Algorithm 1), and early updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain

from overspill.core import OF_OPS, CollectiveKind, Device, Graph, LayerType, Op, Phase, Schedule, TensorKind, numbered
from overspill.core.errors import InfeasibleBudgetError

from .fastest import fastest
from .overlap import overlapped

FEATURE_MAPS = frozenset({TensorKind.ACTIVATION, TensorKind.TEMPORARY, TensorKind.OUTPUT_GRADIENT})
"""Kinds of tensors that plans of feature maps alone may move."""
Followers = Mapping[int, Sequence[int]]
"""For each op, the ops that must come after it, in the order of the graph."""


def depth_first(graph: Graph) -> tuple[int, ...]:
    """Return the ops in Dymem's order: forward depth-first (§3.1, Algorithm 1), backward mirrored, updates unchanged.

    A branch is followed until it meets a join that still waits for another, so that its tensors can leave before the
    next branch begins. Every op sees the values that it sees in the graph's order, so results are the same. An op that
    touches no tensor keeps its place in its phase. Updates of buffers stay last in forward, because AOTAutograd writes
    them back after the forward graph.
    """
    phases = {phase: [op for op in graph.ops if op.phase is phase] for phase in Phase}
    forward = _depth_first([op for op in phases[Phase.FORWARD] if op.layer_type is not LayerType.UPDATE])
    forward += [op.id for op in phases[Phase.FORWARD] if op.layer_type is LayerType.UPDATE]
    position = {graph.ops[op].layer: i for i, op in enumerate(forward)}  # of each layer's last op
    backward = _mirrored(phases[Phase.BACKWARD], position)
    return (*forward, *backward, *(op.id for op in phases[Phase.UPDATE]))


def early_updates(graph: Graph) -> tuple[int, ...]:
    """Return the ops of a whole step with each update as early as possible, so that its gradient is freed.

    An update waits for backward ops that read the parameter, and for those that may recompute from it.
    """
    followers = followers_of(graph.ops)
    # An update waits for recomputations that read its parameter.
    for recomputed, last in _last_recomputation(graph).items():
        for tensor in graph.ops[recomputed].recompute_reads:
            for writer in graph.written_by[tensor]:
                if writer > last:
                    followers[last].append(writer)
    flow = _Flow(graph, followers)
    for op in graph.ops:
        if op.phase is not Phase.UPDATE:
            flow.take(op.id)
    done = set(flow.ops)
    return (*flow.ops, *(op.id for op in graph.ops if op.id not in done))


class _Flow:
    """Ops in the order in which they are taken, with each update as soon as it waits for none.

    An op that waits for a scatter is taken after the next scatter, so that the first can run during it.
    """

    def __init__(self, graph: Graph, followers: Followers) -> None:
        self.ops: list[int] = []
        self._graph, self._followers, self._waiting = graph, followers, _waiting(followers)
        self._scattered: list[int] = []  # the last scatter

    def take(self, op: int) -> None:
        """Take an op, and updates that wait for no more."""
        ready = [op]
        while ready:
            taken = ready.pop()
            self.ops.append(taken)
            over = [taken]
            if (sent := self._graph.ops[taken].collective) is not None and sent.kind is CollectiveKind.SCATTER:
                over, self._scattered = self._scattered, over
            for follower in chain.from_iterable(map(self._followers.__getitem__, over)):
                self._waiting[follower] -= 1
                if not self._waiting[follower] and self._graph.ops[follower].phase is Phase.UPDATE:
                    ready.append(follower)


def _last_recomputation(graph: Graph) -> dict[int, int]:
    """Return for each recomputable op the last op that may need its recomputation, directly or through others."""
    last = [max((i for i in uses if graph.ops[i].phase is not Phase.UPDATE), default=-1) for uses in graph.uses]
    found: dict[int, int] = {}
    for op in reversed(graph.ops):
        if op.recomputable:
            found[op.id] = max(last[t] for t in op.recompute_writes)
            for tensor in op.recompute_reads:
                last[tensor] = max(last[tensor], found[op.id])
    return found


def reordered(graph: Graph, order: Sequence[int]) -> Graph:
    """Return `graph` with its ops in `order`, renumbered; tensors keep their ids."""
    return replace(graph, ops=numbered(graph.ops[op] for op in order))


def in_graph_order(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Return the schedule of `reordered(graph, order)` with the op ids of `graph`."""
    instructions = (replace(i, target=order[i.target]) if i.verb in OF_OPS else i for i in schedule.instructions)
    return replace(schedule, instructions=tuple(instructions))


def best_order(
    plan: Callable[[Graph, Device, int | None, tuple[float, ...]], Schedule | None],
    graph: Graph,
    device: Device,
    budget_bytes: int | None,
    seconds: tuple[float, ...],
) -> Schedule:
    """Return the fastest schedule by `plan` for a whole step, over several orders.

    Updates come as early as possible in one, at the end in another. A third moves feature maps alone: if that fits, it
    has fewer choices, and a heuristic may do better with them. `plan` may return None for one that cannot be faster
    than those before. Raises the InfeasibleBudgetError with the lowest floor if none fits.
    """
    found: list[Schedule] = []
    errors: list[InfeasibleBudgetError] = []
    early, late = early_updates(graph), tuple(range(len(graph.ops)))
    orders = [(graph, order) for order in dict.fromkeys((early, late))]
    for variant, order in (*orders, (feature_maps_alone(graph), late)):
        try:
            made = plan(reordered(variant, order), device, budget_bytes, tuple(seconds[op] for op in order))
        except InfeasibleBudgetError as error:
            errors.append(error.with_traceback(None))  # whose frames would live on, with all that callers hold
            continue
        if made is not None:
            found.append(overlapped(graph, in_graph_order(made, order), device, seconds, budget_bytes))
    best = fastest(graph, device, seconds, found, budget_bytes)
    if best is None:
        raise min(errors, key=lambda error: error.floor_bytes)
    return best


def feature_maps_alone(graph: Graph) -> Graph:
    """Return the whole step with only tensors of forward and backward movable.

    Forward and backward are then two graphs.
    """
    tensors = (
        replace(t, movable=t.movable and (t.kind in FEATURE_MAPS or graph.is_gathered(t.id))) for t in graph.tensors
    )
    return replace(graph, tensors=tuple(tensors), whole_step=False)


def followers_of(ops: Iterable[Op]) -> dict[int, list[int]]:
    """Return for each op those that must follow: readers of what it wrote, writers of what it touched."""
    followers: dict[int, dict[int, None]] = {}
    written: dict[int, int] = {}
    read: dict[int, list[int]] = {}  # since it was last written
    for op in ops:
        followers[op.id] = {}
        # Ops that it must come after: last writers, and readers of what it overwrites.
        before = [written[t] for t in op.reads + op.writes if t in written]
        before += chain.from_iterable(read.get(t, ()) for t in op.writes)
        for earlier in before:
            followers[earlier][op.id] = None
        for tensor in op.reads:
            read.setdefault(tensor, []).append(op.id)
        for tensor in op.writes:
            written[tensor] = op.id
            read[tensor] = []
    return {op: list(later) for op, later in followers.items()}


def _waiting(followers: Followers) -> dict[int, int]:
    """Return for each op the number of ops that it waits for."""
    waiting = dict.fromkeys(followers, 0)
    for op in chain.from_iterable(followers.values()):
        waiting[op] += 1
    return waiting


def _depth_first(ops: Sequence[Op]) -> list[int]:
    """Return the ops in the order of Algorithm 1, without recursion.

    An op is taken once the last that it waits for calls it (lines 5 to 8).
    """
    followers = followers_of(op for op in ops if _touches(op))
    waiting = _waiting(followers)
    flow: list[int] = []
    calls = [op for op in reversed(followers) if not waiting[op]]
    while calls:
        called = calls.pop()
        waiting[called] -= 1
        if waiting[called] <= 0:
            flow.append(called)
            calls += reversed(followers[called])
    return _with_the_rest(flow, ops)


def _mirrored(ops: Sequence[Op], position: Mapping[str, int]) -> list[int]:
    """Return the backward ops: of those that are ready, always the one whose layer is latest in forward.

    An op of no forward layer, such as a sum of gradients, goes with the op before it in the graph.
    """
    followers = followers_of(op for op in ops if _touches(op))
    waiting = _waiting(followers)
    rank: dict[int, int] = {}
    last = -max(position.values(), default=0)
    for op in ops:
        last = -position[op.layer] if op.layer in position else last
        rank[op.id] = last
    # Take ready ops by rank.
    ready = [(rank[first], first) for first in followers if not waiting[first]]
    heapify(ready)
    flow: list[int] = []
    while ready:
        _, taken = heappop(ready)
        flow.append(taken)
        for follower in followers[taken]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heappush(ready, (rank[follower], follower))
    return _with_the_rest(flow, ops)


def _touches(op: Op) -> bool:
    return bool(op.reads or op.writes)


def _with_the_rest(flow: list[int], ops: Sequence[Op]) -> list[int]:
    """Return `flow` with ops that touch no tensor put back at their places in `ops`."""
    if len(flow) == len(ops):
        return flow
    others = iter(flow)
    return [next(others) if _touches(op) else op.id for op in ops]
