"""Lower a schedule to one program for each stretch between two cuts: forward | backward | update.

The user's code runs at the cuts (`cuts.py`). Three things cross them:

- *Residents*, tensors that outlive the step: each program takes those that it touches, and gives back those that it
  changes.
- What backward needs of forward, as autograd's saved tensors: tensors on the device, and handles of those in the store.
- Gradients of parameters.

Instructions are emitted in the order of the schedule (`emitter.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from overspill.capture.compiled.cut_step import CapturedCutStep
from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.joint import NO_VERSION_CHECK, storages
from overspill.core import OF_OPS, Schedule, Tiers, Verb
from overspill.pytorch.graphs import LazyGraphModule

from .arena import Arena
from .cuts import Part, Place, parts_of
from .emitter import Emitter, Together
from .transfer.ops import from_disk, to_disk

NO_ARENA = Arena()


@dataclass(frozen=True)
class Stretch:
    """One program, and the tensors of the plan that it takes and gives."""

    module: fx.GraphModule
    plain: tuple[int, ...]
    """Positions of the caller's arguments that it takes, in order."""
    own: int
    """How many results are for the caller, and for backward."""
    before: dict[int, Place]
    """The places of all tensors as it begins."""
    takes: dict[int, Place]
    """Residents taken behind the arguments; one that is in BOTH places is two inputs, the tensor first."""
    gives: dict[int, Place]
    """Residents given back behind the results for the caller, likewise; others of `takes` stay as they are."""

    def residents(self) -> Iterator[tuple[int, int]]:
        """Yield the position of each of `takes` among the program's inputs, the first of two, with the tensor."""
        position = len(self.plain)
        for tensor, place in self.takes.items():
            yield position, tensor
            position += 1 + (place is Place.BOTH)


def lower(
    captured: Captured,
    schedule: Schedule,
    engine: int,
    arena: Arena = NO_ARENA,
    groups: Iterable[tuple[int, ...]] = (),
    together: Together | None = None,
    tiers: Tiers | None = None,
) -> tuple[Stretch, ...]:
    """Return the stretches that carry out `schedule`: forward, backward, and the update where it is captured.

    Transfers go through engine number `engine`. Tensors with a place in the `arena` are put there. The updates of each
    of `groups`, which follow one another in a whole step, are one call, made by `together`. Copies in the store go on
    to the disk below it, and come back, by `tiers`.
    """
    lowering = _Lowering(captured, schedule, engine, arena, tiers)
    return lowering.stretches({group[0]: group for group in groups}, together)


def shown(captured: Captured, stretches: Sequence[Stretch]) -> list[fx.GraphModule]:
    """Return modules by which AOTAutograd learns what forward and backward take and return, without residents."""
    if not isinstance(captured, CapturedCutStep):
        return [stretch.module for stretch in stretches]
    fore, *later = stretches
    found = [_signature(fore, [node.meta for node in captured.given])]
    for back in later[:1]:
        returned = [n.meta if isinstance(n, fx.Node) else {} for n in captured.joint.backward_outputs]
        found.append(_signature(back, [n.meta for n in _inputs(back.module)[: len(back.plain)]], returned))
    return found


class _Lowering:
    """Lowers one captured step."""

    def __init__(self, captured: Captured, schedule: Schedule, engine: int, arena: Arena, tiers: Tiers | None) -> None:
        self._captured = captured
        self._engine = engine
        self._arena = arena
        self._parts = parts_of(captured.graph, schedule, trains=bool(captured.joint.backward_outputs))
        self._node_of = {captured.tensor_of[storages(n)[0]]: n for n in captured.joint.primals if captured.moves(n)}
        """The input that each resident is."""
        self._moments = _moments(self._parts, tiers)
        self._on_host = _calls_on_host(captured, schedule) if tiers is None else {}

    def stretches(self, groups: dict[int, tuple[int, ...]], together: Together | None) -> tuple[Stretch, ...]:
        """Return the stretches in order; `groups` are by the first update of each."""
        captured, joint = self._captured, self._captured.joint
        # Forward: inputs that do not move, then residents; outputs, what backward needs, then residents.
        first, *later = self._parts
        forward = self._emitter(backward=False)
        forward.groups, forward.together = groups | self._on_host, together
        plain = [position for position, node in enumerate(captured.given) if not captured.moves(node)]
        for position in plain:
            forward.add_placeholder(captured.given[position])
        residents = self._emit(forward, first)
        saved, handles = self._crossing(later[0], forward) if later else ([], [])
        results = forward.results(captured.results, saved, handles)
        fore = self._finished(forward, first, plain, residents, *results)
        if not later:
            return (fore,)
        # Backward: what forward has saved, gradients of outputs, then residents; gradients, then residents.
        second, *update = later
        backward = self._emitter(backward=True)
        if isinstance(captured, CapturedCutStep):
            backward.returned_later = frozenset(captured.made.values())
        backward.add_saved(saved, handles, forward)
        for node in joint.tangents:
            backward.add_placeholder(node)
        count = len(backward.graph.find_nodes(op="placeholder"))
        residents = self._emit(backward, second)
        made = [self._gradient(backward, second, node) for node in joint.backward_outputs]
        back = self._finished(backward, second, range(count), residents, made, joint.backward_descs)
        if not isinstance(captured, CapturedCutStep):
            return fore, back
        return fore, back, self._update(captured, update[0], together)

    def _update(self, captured: CapturedCutStep, part: Part, together: Together | None) -> Stretch:
        """Lower the update: it takes gradients of parameters, parameters that do not move, then residents."""
        emitter = self._emitter(backward=False)
        emitter.groups, emitter.together = self._on_host, together
        for position, place in gradient_places(captured, part.before).items():
            node = captured.read[position]
            tensor = captured.tensor_of[storages(node)[0]]
            emitter.known_as(tensor, node)
            _add_input(emitter, tensor, node, place)
        for position in captured.read:
            if not captured.moves(captured.given[position]):
                emitter.add_placeholder(captured.given[position])
        count = len(emitter.graph.find_nodes(op="placeholder"))
        residents = self._emit(emitter, part)
        return self._finished(emitter, part, range(count), residents, [], [])

    def _emitter(self, *, backward: bool) -> Emitter:
        return Emitter(self._captured, self._engine, backward=backward, arena=self._arena)

    def _emit(self, emitter: Emitter, part: Part) -> dict[int, bool]:
        """Emit a part behind its residents as inputs; return these, and whether the part changes or moves each."""
        found: dict[int, bool] = {}
        for _, instruction in part.instructions:
            if instruction.verb not in OF_OPS:
                found[instruction.target] = True
                continue
            op, again = self._captured.graph.ops[instruction.target], instruction.verb is Verb.RECOMPUTE
            for tensor in op.recompute_reads if again else op.reads:
                found.setdefault(tensor, False)
            found |= dict.fromkeys(() if again else op.writes, True)
        emitter.moments = {position: self._moments[position] for position, _ in part.instructions if position >= 0}
        found |= {tensor: True for calls in emitter.moments.values() for _, tensor in calls}
        residents = {tensor: changed for tensor, changed in found.items() if tensor in self._node_of}
        for tensor in residents:
            _add_input(emitter, tensor, self._node_of[tensor], part.before[tensor])
        emitter.emit(part.instructions)
        return residents

    def _finished(
        self,
        emitter: Emitter,
        part: Part,
        plain: Iterable[int],
        residents: dict[int, bool],
        own: list[Any],
        descs: list[Any],
    ) -> Stretch:
        """Return the stretch of a part, which returns its `own` results, then the residents that it changes."""
        takes = {tensor: part.before[tensor] for tensor in residents}
        gives = {
            tensor: part.after[tensor] for tensor, changed in residents.items()
            if changed or takes[tensor] is not Place.DEVICE
        }  # fmt: skip
        values: list[fx.Node] = []
        for tensor, place in gives.items():
            if place is not Place.STORE:
                values.append(emitter.values[self._node_of[tensor]])
            if place is not Place.DEVICE:
                values.append(emitter.handles[tensor])
        return Stretch(emitter.finish([*own, *values], descs), tuple(plain), len(own), part.before, takes, gives)

    def _crossing(self, backward: Part, forward: Emitter) -> tuple[list[fx.Node], list[int]]:
        """Return what backward needs of forward, without residents: roots on the device, and tensors as handles."""
        captured, graph = self._captured, self._captured.graph
        # What it reads or frees, and what it prefetches; some of both may be made in backward.
        read: dict[int, None] = {}
        prefetched: dict[int, None] = {}
        for _, instruction in backward.instructions:
            verb, target = instruction.verb, instruction.target
            if verb is Verb.RECOMPUTE:
                read |= dict.fromkeys(graph.ops[target].recompute_reads)
            elif verb is Verb.RUN and target in captured.nodes:
                read |= dict.fromkeys(graph.ops[target].reads)
            elif verb in (Verb.FREE, Verb.OFFLOAD):
                read.setdefault(target)
            elif verb is Verb.PREFETCH:
                prefetched.setdefault(target)
        outputs = [node for node in captured.joint.backward_outputs if isinstance(node, fx.Node)]
        read |= dict.fromkeys(captured.tensor_of[key] for node in outputs for key in storages(node))
        saved = [
            root for tensor in read if tensor not in self._node_of for root in forward.roots_of(tensor)
            if root in forward.values and root.op != "get_attr"
        ]  # fmt: skip
        saved.sort(key=lambda root: bool(root.meta.get(NO_VERSION_CHECK, False)))
        return saved, [t for t in prefetched if t in forward.handles and t not in self._node_of]

    def _gradient(self, backward: Emitter, part: Part, node: object) -> fx.Node | None:
        """Return what backward returns for a gradient: its tensor, or its handle if it has left for the store."""
        if not isinstance(node, fx.Node):
            return None
        if node in backward.returned:
            return backward.returned[node]
        tensor = self._captured.tensor_of[storages(node)[0]]
        return backward.handles[tensor] if part.after.get(tensor) is Place.STORE else backward.values.own(node)


def _calls_on_host(captured: Captured, schedule: Schedule) -> dict[int, tuple[int, ...]]:
    """Return the updates of each call on the host that has several, by the first."""
    joined, found = schedule.joined(captured.graph), dict[int, tuple[int, ...]]()
    first = 0
    for position in sorted(joined):
        if position - 1 not in joined:
            first = schedule.instructions[position - 1].target
        found[first] = *found.get(first, (first,)), schedule.instructions[position].target
    return found


def _moments(parts: Sequence[Part], tiers: Tiers | None) -> dict[int, list[tuple[Callable[..., None], int]]]:
    """Return the calls for the disk below the store, by the position of the instruction that each comes before."""
    kept = sorted(position for part in parts for position, _ in part.instructions if position >= 0)
    found: dict[int, list[tuple[Callable[..., None], int]]] = {position: [] for position in kept}
    for stay in () if tiers is None else tiers.stays:
        for call, position in ((to_disk, stay.write), (from_disk, stay.read)):
            found[kept[min(bisect_left(kept, position), len(kept) - 1)]].append((call, stay.tensor))
    return found


def gradient_places(captured: CapturedCutStep, before: Mapping[int, Place]) -> dict[int, Place]:
    """Return where the update takes each gradient, by the position of the parameter, in the order of its inputs.

    `before` are the places as it begins.
    """
    tensors = {position: captured.tensor_of[storages(node)[0]] for position, node in captured.read.items()}
    return {position: before.get(tensor, Place.DEVICE) for position, tensor in tensors.items()}


def _add_input(emitter: Emitter, tensor: int, node: fx.Node, place: Place) -> None:
    """Add the tensor of the plan that `node` is as an input: on the device, its handle, or both."""
    if place is not Place.STORE:
        emitter.add_placeholder(node)
    if place is not Place.DEVICE:
        emitter.add_handle(tensor)


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _signature(
    stretch: Stretch, inputs: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]] | None = None
) -> fx.GraphModule:
    """Return a module that nobody calls, with the inputs of AOTAutograd and a stretch's results for the caller.

    The inputs have the metadata `inputs`, and the results that of the program's, or `results` if given.
    """
    graph = fx.Graph()
    placed = []
    for number, meta in enumerate(inputs):
        node = graph.placeholder(f"input_{number}")
        node.meta = dict(meta)
        placed.append(node)
    same = {ours: placed[position] for ours, position in zip(_inputs(stretch.module), stretch.plain, strict=False)}
    returned: list[Any] = []
    output = stretch.module.graph.find_nodes(op="output")[0]
    for number, result in enumerate(output.args[0][: stretch.own]):
        if isinstance(result, fx.Node) and result not in same:
            node = graph.call_function(torch.ops.aten.empty.memory_format, ([0],))
            node.meta = dict(result.meta if results is None else results[number])
            same[result] = node
        returned.append(same[result] if isinstance(result, fx.Node) else result)
    graph.output(tuple(returned)).meta["desc"] = list(output.meta["desc"])
    return LazyGraphModule(stretch.module, graph)
