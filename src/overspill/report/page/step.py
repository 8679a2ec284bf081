"""Convert plans and layouts to linked views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from overspill.core import OF_OPS, Event, Frame, Graph, Layout, Schedule, Stream, Timeline, Trace, Verb
from overspill.core.units import format_apart, format_bytes
from overspill.placement.allocators.caching import CachingAllocator
from overspill.placement.allocators.planned import CALLED, LIVE
from overspill.placement.packing import DEFAULT, SOLVERS, solver_named
from overspill.placement.place import SEARCH, check_placer
from overspill.placement.replay import layout_of
from overspill.plans.plan import Plan
from overspill.policies.in_core import Liveness
from overspill.simulate import owned_trace

from .columns import columns_of, frames_of, integers, shape_of
from .sections import Mark, Ops, Step, StepRun, Tensors, Words

STREAMS = tuple(Stream)
VERBS = tuple(Verb)
_SIZES = tuple(1 << power for power in (30, 28, 26, 24, 22, 20, 18, 16, 12))
"""The upper ends of the size classes in which an address map without kinds sorts its blocks."""


def step(plan: Plan, placer: str | None = None, title: str = "The step") -> Step:
    """Return the views of `plan` and of the unmanaged step.

    `placer` gives its blocks their addresses (None: PyTorch's caching allocator).
    """
    is_placed = (
        plan.device_bytes is not None or placer is not None
    )  # the budget is for addresses too, not for live bytes
    placer = DEFAULT if placer == LIVE else placer or CachingAllocator.name
    budget, *taken = (Mark(what, nbytes, on_addresses=is_placed) for what, nbytes in limits_of(plan))
    planned = run(plan.graph, plan.schedule, plan.timeline, f"plan ({plan.schedule.policy})", placer, plan.groups)
    plain = run(plan.graph, Liveness().plan(plan.graph, plan.device), plan.unmanaged_timeline, "unmanaged", placer)
    views = of_graph(plan.graph, (replace(planned, marks=tuple(taken)), plain), title, (budget,))
    return views if is_placed else replace(views, note=_above(plan, planned))


def limits_of(plan: Plan) -> list[tuple[str, int]]:
    """Return the limits of a plan's live bytes: budget and allocator.

    For a budget that is a GPU's size, they also have the bytes that the allocator reserves.
    """
    if plan.device_bytes is None or plan.reserved_bytes is None:
        return [("budget", plan.budget_bytes)]
    return [("budget less the context", plan.most_live_bytes), (reserved_by(plan), plan.reserved_bytes)]


def reserved_by(plan: Plan) -> str:
    """Return which allocator reserves the bytes of a plan for a card, in words."""
    called = {LIVE: CALLED, None: "PyTorch", CachingAllocator.name: "PyTorch"}
    return f"reserved by {called.get(plan.pool, 'PyTorch' if plan.pool in SOLVERS else plan.pool)}"


def _above(plan: Plan, planned: StepRun) -> str:
    """Return why addresses exceed a budget that is kept: the budget counts live bytes, not the gaps between them."""
    reach = planned.reserved_bytes or 0
    if reach <= plan.asked_bytes:
        return ""
    reaches, budget = format_apart(reach, plan.asked_bytes)
    return (
        f"The budget, {budget}, is of live bytes. The addresses reach {reaches}: they are where PyTorch's caching "
        "allocator "
        "would put the blocks, with the gaps that it leaves between them."
    )


def of_graph(graph: Graph, runs: tuple[StepRun, ...], title: str, marks: tuple[Mark, ...] = ()) -> Step:
    """Return the views of `runs` of one graph."""
    layers = {layer: index for index, layer in enumerate(dict.fromkeys(op.layer for op in graph.ops))}
    # Tensors belong to the layer of the first op that uses them.
    home = [uses[0] if uses else -1 for uses in graph.uses]
    maker = [graph.producer.get(t.id, -1) for t in graph.tensors]
    tensors = Tensors(
        name=[t.name or f"tensor {t.id}" for t in graph.tensors],
        kind=[t.kind.value for t in graph.tensors],
        shape=[shape_of(t.shape, t.dtype) for t in graph.tensors],
        nbytes=integers(t.nbytes for t in graph.tensors),
        maker=integers(maker),
        layer=integers(layers[graph.ops[op].layer] if op >= 0 else -1 for op in home),
    )
    # Ops, with what they read and write and the lines that ran them.
    first_read, read = columns_of([op.reads for op in graph.ops])
    first_written, written = columns_of([op.writes for op in graph.ops])
    first_frame, frame = columns_of([op.frames for op in graph.ops] if graph.frames else ())
    ops = Ops(
        name=[op.name for op in graph.ops],
        phase=[op.phase.value for op in graph.ops],
        layer=integers(layers[op.layer] for op in graph.ops),
        flops=integers(op.flops for op in graph.ops),
        first_read=first_read,
        read=read,
        first_written=first_written,
        written=written,
        first_frame=first_frame,
        frame=frame,
    )
    return Step(title, tuple(layers), tensors, ops, runs, marks, frames=frames_of(graph.frames))


def _shown(graph: Graph, event: Event) -> int:
    """Return the subject of a drawn event: an op on the compute stream, otherwise a tensor."""
    if event.stream is Stream.COMPUTE or event.verb not in OF_OPS:
        return event.target
    return next(iter(graph.ops[event.target].writes), 0)


def run(
    graph: Graph,
    schedule: Schedule,
    timeline: Timeline,
    name: str,
    placer: str | None = None,
    groups: Iterable[Sequence[int]] = (),
) -> StepRun:
    """Return a schedule's memory and events over time.

    Times are those of `timeline`. Addresses need the name of a `placer`.
    """
    # Blocks of the schedule, and addresses for them.
    trace, owners = owned_trace(graph, schedule, groups)
    layout = None if placer is None else _layout(trace, placer)
    events = timeline.events
    return StepRun(
        name=name,
        seconds=np.array(timeline.clock_seconds, dtype=np.float64),
        positions=len(schedule.instructions),
        start=integers(b.start for b in trace.blocks),
        end=integers(b.end for b in trace.blocks),
        tensor=integers(owners),
        nbytes=integers(b.nbytes for b in trace.blocks),
        offset=integers(() if layout is None else layout.offsets),
        # What each stream does when.
        streams=tuple(stream.value for stream in timeline.streams),
        verbs=tuple(verb.value for verb in VERBS),
        stream=integers(STREAMS.index(e.stream) for e in events),
        verb=integers(VERBS.index(e.verb) for e in events),
        target=integers(_shown(graph, e) for e in events),
        begun=np.array([e.start_seconds for e in events], dtype=np.float64),
        ended=np.array([e.end_seconds for e in events], dtype=np.float64),
        event_at=integers(e.instruction for e in events),
        # Waits of compute.
        stall_begun=np.array([s.start_seconds for s in timeline.stalls], dtype=np.float64),
        stall_ended=np.array([s.end_seconds for s in timeline.stalls], dtype=np.float64),
        stall_cause=[s.cause for s in timeline.stalls],
        placer=placer or "",
        reserved_bytes=None if layout is None else layout.peak_bytes,
    )


def addresses(
    trace: Trace,
    layout: Layout,
    title: str,
    capacity_bytes: int | None = None,
    frames: Sequence[Frame] = (),
    made_by: Sequence[int] = (),
    position: str = "position",
) -> Step:
    """Return the views of a layout alone: blocks by size, over positions.

    Each space is above the one before. `made_by` has for each block the line that requested it, by its position among
    `frames`. `position` is the word for a position.
    """
    blocks = trace.blocks
    # Stack the spaces.
    base, bases = 0, {}
    for space in trace.spaces:
        bases[space] = base
        base += max(o + b.nbytes for o, b in zip(layout.offsets, blocks, strict=True) if b.space == space)
    # A rectangle for each time that a block is live.
    pieces = [(i, start, end) for i, block in enumerate(blocks) for start, end in block.pieces]
    first = min((start for _, start, _ in pieces), default=0)
    last = max((end for *_, end in pieces), default=1)
    found = StepRun(
        name=layout.solver,
        seconds=np.zeros(0),
        positions=last - first,
        start=integers(start - first for _, start, _ in pieces),
        end=integers(end - first for *_, end in pieces),
        tensor=integers(i for i, *_ in pieces),
        nbytes=integers(blocks[i].nbytes for i, *_ in pieces),
        offset=integers(layout.offsets[i] + bases[blocks[i].space] for i, *_ in pieces),
        placer=layout.solver,
        reserved_bytes=layout.peak_bytes,
    )
    # Blocks stand for tensors; there are no ops.
    nothing = integers(())
    tensors = Tensors(
        name=[b.name or f"block {b.id}" for b in blocks],
        kind=[_size_class(b.nbytes) for b in blocks],
        shape=[f"space {b.space}" if len(trace.spaces) > 1 else "" for b in blocks],
        nbytes=integers(b.nbytes for b in blocks),
        maker=np.full(len(blocks), -1),
        layer=np.full(len(blocks), -1),
        frame=integers(made_by),
    )
    ops = Ops((), (), nothing, nothing, integers((0,)), nothing, integers((0,)), nothing)
    marks = () if capacity_bytes is None else (Mark("capacity", capacity_bytes, on_addresses=True),)
    words = Words("Live bytes", "block", "live", position, "size class")
    return Step(title, (), tensors, ops, (found,), marks, frames=frames_of(frames), words=words)


def _layout(trace: Trace, placer: str) -> Layout | None:
    """Return the layout by an allocator or a solver; None if it fails."""
    check_placer(placer)
    if placer in SOLVERS:
        return solver_named(placer).solve(trace, SEARCH).layout
    return layout_of(trace, placer)


def _size_class(nbytes: int) -> str:
    least = next((size for size in _SIZES if nbytes >= size), 0)
    return f"{format_bytes(least)} and more" if least else f"less than {format_bytes(_SIZES[-1])}"
