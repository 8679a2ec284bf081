"""Lowering: a Schedule becomes FX graphs for forward and backward.

Instructions are emitted exactly in the order of the schedule (`emitter.py`).

Two things cross from forward to backward as autograd's saved tensors. One is the tensors that the schedule leaves on
the device and backward reads, as roots. The other is the handles of tensors in the store.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.joint import NO_VERSION_CHECK, storages
from overspill.capture.compiled.whole_step import CapturedStep
from overspill.core import Graph, Instruction, Schedule, Verb

from .arena import Arena
from .emitter import Emitter, Together
from .halves import crossing, split

NO_ARENA = Arena()


def lower(
    captured: Captured, schedule: Schedule, engine: int, arena: Arena = NO_ARENA
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and backward graphs that carry out `schedule`.

    Transfers go through engine number `engine`. Tensors with a place in the `arena` are put there.
    """
    forward_part, backward_part = split(captured.graph, schedule)
    forward = Emitter(captured, engine, backward=False, arena=arena)
    for node in captured.joint.primals:
        forward.add_placeholder(node)
    forward.emit(forward_part)
    # What backward needs of forward becomes its inputs.
    saved, handles = _crossing(captured, backward_part, forward)
    forward_module = forward.finish_forward(saved, handles)
    backward = Emitter(captured, engine, backward=True, arena=arena)
    backward.add_saved(saved, handles, forward)
    for node in captured.joint.tangents:
        backward.add_placeholder(node)
    backward.emit(backward_part, len(forward_part))
    return forward_module, backward.finish_backward()


def lower_inference(captured: Captured, schedule: Schedule, engine: int, arena: Arena = NO_ARENA) -> fx.GraphModule:
    """Return the single graph of a step without backward; `arena` is as for `lower`."""
    emitter = Emitter(captured, engine, backward=False, arena=arena)
    for node in captured.joint.primals:
        emitter.add_placeholder(node)
    emitter.emit(schedule.instructions)
    return emitter.finish_forward([], [])


def lower_step(
    captured: CapturedStep,
    schedule: Schedule,
    engine: int,
    groups: Iterable[tuple[int, ...]],
    together: Together,
    arena: Arena = NO_ARENA,
) -> fx.GraphModule:
    """Return the single graph of a whole step.

    The updates of each of `groups`, which follow one another, are one call. The graph takes the captured primals, then
    the handles of those that are `copied`. It returns the loss, the other results of the step, and the persistent
    tensors that may move. The latter have the order of `captured.joint.primals`: as handles if `schedule` has them in
    the store between steps, otherwise as tensors. `arena` is as for `lower`.
    """
    emitter = Emitter(captured, engine, backward=False, arena=arena)
    emitter.groups = {group[0]: group for group in groups}
    emitter.together = together
    # Inputs: tensors, handles of what is in the store, handles of what is in both.
    stored = frozenset(schedule.stored)
    for node in captured.joint.primals:
        (tensor,) = (captured.tensor_of[key] for key in storages(node))
        if tensor in stored:
            emitter.add_handle(tensor)
        else:
            emitter.add_placeholder(node)
    for tensor in copied(captured.graph, schedule):
        emitter.add_handle(tensor)
    # The instructions, then the results.
    emitter.emit(schedule.instructions)
    returned = (captured.loss, *captured.others)
    return emitter.finish_step(returned, [n for n in captured.joint.primals if captured.moves(n)], stored)


def copied(graph: Graph, schedule: Schedule) -> list[int]:
    """Return the read-only tensors that are both on the device and in the store between steps.

    No op writes them, and `schedule` reads them from the store.
    """
    prefetched = dict.fromkeys(schedule.targets(Verb.PREFETCH))
    return [tensor for tensor in prefetched if tensor in graph.read_only and tensor not in schedule.stored]


def _crossing(captured: Captured, backward: Iterable[Instruction], forward: Emitter) -> tuple[list[fx.Node], list[int]]:
    """Return backward's inputs from forward: roots on the device, and tensors as handles."""
    read, prefetched = crossing(captured.graph, captured.nodes, backward)
    outputs = [node for node in captured.joint.backward_outputs if isinstance(node, fx.Node)]
    needed = dict.fromkeys([*read, *(captured.tensor_of[key] for node in outputs for key in storages(node))])
    saved = [
        root
        for tensor in needed
        for root in forward.roots_of(tensor)
        if root in forward.values and root.op != "get_attr"
    ]
    saved.sort(key=lambda root: bool(root.meta.get(NO_VERSION_CHECK, False)))
    return saved, [tensor for tensor in prefetched if tensor in forward.handles]
