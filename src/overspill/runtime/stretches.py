"""Lower a schedule to one program for each stretch between two cuts: forward, backward, update.

The user's code runs at the cuts. What crosses them are tensors that outlive the step (`Resident`), gradients, and, from
forward to backward, what autograd saves. A transfer that is under way at a cut is awaited there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx

from overspill.capture.compiled.cut_step import CapturedCutStep
from overspill.capture.compiled.joint import NO_VERSION_CHECK, storages
from overspill.core import Graph, Instruction, Phase, Schedule, Verb
from overspill.pytorch.graphs import LazyGraphModule

from .emitter import Emitter
from .halves import crossing, split
from .lower import NO_ARENA, copied


class Place(Enum):
    """Where a tensor is at a cut."""

    DEVICE = "device"
    STORE = "store"
    BOTH = "both"


@dataclass(frozen=True)
class Part:
    """The instructions of one stretch, with the places of tensors around it."""

    instructions: tuple[tuple[int, Instruction], ...]
    """Each with its position in the schedule."""
    before: dict[int, Place]
    """Of tensors that exist."""
    after: dict[int, Place]


@dataclass(frozen=True)
class Stretch:
    """One program, and the tensors of the plan that it takes and gives."""

    module: fx.GraphModule
    plain: tuple[int, ...]
    """Positions of the caller's arguments that it takes, in order."""
    takes: tuple[tuple[int, Place], ...]
    """Tensors taken behind these; one that is in BOTH places is two inputs, the tensor first."""
    gives: tuple[tuple[int, Place], ...]
    """Tensors given back behind the results for the caller, likewise."""
    own: int
    """How many results are for the caller."""
    lent: tuple[int, ...]
    """Tensors among `takes` that stay as they are, and are not given back."""
    before: dict[int, Place]
    gradients: tuple[tuple[int, Place], ...] = ()
    """For the update: the gradients that it takes, by the position of the parameter, in front of `takes`."""
    fixed: tuple[int, ...] = ()
    """For the update: the positions of parameters that do not move, behind the gradients."""


Lowered = tuple[tuple[fx.GraphModule, ...], tuple[Stretch, ...]]
"""What AOTAutograd is shown, and the stretches: of forward and backward, or of forward alone."""


class _Walk:
    """Follows the places of tensors through a schedule."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self._graph = graph
        self._state: dict[int, Verb] = {}  # PREFETCH: arriving, OFFLOAD: leaving, RUN: there
        self._stored: set[int] = set()
        self._awaited: set[tuple[Verb, int]] = set()
        for tensor in graph.tensors:
            if tensor.persistent and tensor.id not in schedule.stored:
                self._state[tensor.id] = Verb.RUN
        self._stored.update(schedule.stored, copied(graph, schedule))

    def places(self) -> dict[int, Place]:
        there = {t: Place.BOTH if t in self._stored else Place.DEVICE for t in self._state}
        return there | {t: Place.STORE for t in self._stored if t not in self._state}

    def part(self, instructions: Iterable[tuple[int, Instruction]], *, last: bool) -> Part:
        before, kept = self.places(), []
        for position, instruction in instructions:
            if (instruction.verb, instruction.target) in self._awaited:
                self._awaited.discard((instruction.verb, instruction.target))
                continue
            kept.append((position, instruction))
            self._follow(instruction)
        if not last:
            for tensor, state in list(self._state.items()):
                if state is not Verb.RUN:
                    verb = Verb.AWAIT_OFFLOAD if state is Verb.OFFLOAD else Verb.AWAIT_PREFETCH
                    self._awaited.add((verb, tensor))
                    kept.append((-1, Instruction(verb, tensor)))
                    self._follow(kept[-1][1])
        return Part(tuple(kept), before, self.places())

    def _follow(self, instruction: Instruction) -> None:
        verb, target = instruction.verb, instruction.target
        if verb in (Verb.RUN, Verb.RECOMPUTE):
            op = self._graph.ops[target]
            for tensor in op.writes if verb is Verb.RUN else op.recompute_writes:
                if verb is Verb.RUN or tensor not in self._state:
                    self._stored.discard(tensor)
                self._state[tensor] = Verb.RUN
        elif verb in (Verb.OFFLOAD, Verb.PREFETCH):
            self._state[target] = verb
        elif verb is Verb.AWAIT_OFFLOAD:
            self._state[target] = Verb.RUN
            self._stored.add(target)
        elif verb is Verb.AWAIT_PREFETCH:
            self._state[target] = Verb.RUN
        elif verb is Verb.FREE:
            del self._state[target]


def parts_of(graph: Graph, schedule: Schedule, *, trains: bool) -> list[Part]:
    """Return the parts of forward, backward and update; one for all if the graph does not train."""
    first, _ = split(graph, schedule)
    numbered, walk = list(enumerate(schedule.instructions)), _Walk(graph, schedule)
    if not trains:
        return [walk.part(numbered, last=True)]
    runs = (
        i for i, x in numbered
        if x.verb is Verb.RECOMPUTE or (x.verb is Verb.RUN and graph.ops[x.target].phase is not Phase.UPDATE)
    )  # fmt: skip
    second = max(runs, default=-1) + 1
    while second < len(numbered) and numbered[second][1].verb in (Verb.OFFLOAD, Verb.AWAIT_OFFLOAD, Verb.FREE):
        second += 1
    return [
        walk.part(numbered[: len(first)], last=False), walk.part(numbered[len(first) : second], last=False),
        walk.part(numbered[second:], last=True),
    ]  # fmt: skip


class _Lowering:
    """Lowers one captured step."""

    def __init__(self, captured: CapturedCutStep, schedule: Schedule, engine: int) -> None:
        self.captured = captured
        self.engine = engine
        self.parts = parts_of(captured.graph, schedule, trains=bool(captured.joint.backward_outputs))
        self.node_of = {captured.tensor_of[storages(n)[0]]: n for n in captured.joint.primals if captured.moves(n)}
        """The input that each resident is."""

    def emitter(self, *, backward: bool) -> Emitter:
        return Emitter(self.captured, self.engine, backward=backward, arena=NO_ARENA)

    def touched(self, part: Part) -> dict[int, None]:
        """Return the residents that a part reads, writes or moves."""
        found: dict[int, None] = {}
        for _, instruction in part.instructions:
            if instruction.verb in (Verb.RUN, Verb.RECOMPUTE, Verb.START):
                op = self.captured.graph.ops[instruction.target]
                again = instruction.verb is Verb.RECOMPUTE
                found.update(dict.fromkeys(op.recompute_reads if again else (*op.reads, *op.writes)))
            else:
                found.setdefault(instruction.target)
        return dict.fromkeys(t for t in found if t in self.node_of)

    def take(self, emitter: Emitter, part: Part) -> tuple[tuple[tuple[int, Place], ...], tuple[int, ...]]:
        """Add the residents of a part as inputs; return them, and those that stay as they are."""
        takes = tuple((t, part.before[t]) for t in self.touched(part))
        for tensor, place in takes:
            if place is not Place.STORE:
                emitter.add_placeholder(self.node_of[tensor])
            if place is not Place.DEVICE:
                emitter.add_handle(tensor)
        changed = {i.target for _, i in part.instructions if i.verb not in (Verb.RUN, Verb.RECOMPUTE, Verb.START)}
        ops = (self.captured.graph.ops[i.target] for _, i in part.instructions if i.verb is Verb.RUN)
        changed.update(t for op in ops for t in op.writes)
        return takes, tuple(t for t, place in takes if t not in changed and place is Place.DEVICE)

    def give(self, emitter: Emitter, part: Part, takes: Iterable[tuple[int, Place]], lent: Sequence[int]) -> tuple[
        tuple[tuple[int, Place], ...], list[fx.Node]
    ]:  # fmt: skip
        """Return the residents that a part gives back, and their values and handles at its end."""
        gives, values = [], []
        for tensor, _ in takes:
            if tensor in lent:
                continue
            place = part.after[tensor]
            gives.append((tensor, place))
            if place is not Place.STORE:
                values.append(emitter.values[self.node_of[tensor]])
            if place is not Place.DEVICE:
                values.append(emitter.handles[tensor])
        return tuple(gives), values

    def lowered(self) -> Lowered:
        captured, joint = self.captured, self.captured.joint
        first, *later = self.parts
        # Forward: the model's inputs, then residents; outputs, what backward needs, then residents.
        forward = self.emitter(backward=False)
        plain = [i for i, node in enumerate(captured.given) if not captured.moves(node)]
        for position in plain:
            forward.add_placeholder(captured.given[position])
        takes, lent = self.take(forward, first)
        forward.emit_at(first.instructions)
        saved, handles = self._crossing(later[0], forward) if later else ([], [])
        outputs, descs = forward.forward_results(saved, handles)
        gives, values = self.give(forward, first, takes, lent)
        module = forward.finish([*outputs, *values], descs)
        fore = Stretch(module, tuple(plain), takes, gives, len(outputs), lent, first.before)
        shown = _signature(fore.module, [n.meta for n in captured.given], plain, len(outputs), descs)
        if not later:
            return (shown,), (fore,)
        # Backward: what forward has saved, gradients of outputs, then residents; gradients, then residents.
        second, backward = later[0], self.emitter(backward=True)
        backward.returned_later = frozenset(captured.made.values())
        backward.add_saved(saved, handles, forward)
        for node in joint.tangents:
            backward.add_placeholder(node)
        count = len(backward.graph.find_nodes(op="placeholder"))
        takes, lent = self.take(backward, second)
        backward.emit_at(second.instructions)
        made = [self._gradient(backward, second, node) for node in joint.backward_outputs]
        gives, values = self.give(backward, second, takes, lent)
        module = backward.finish([*made, *values], joint.backward_descs)
        back = Stretch(module, tuple(range(count)), takes, gives, len(made), lent, second.before)
        metas = [n.meta if isinstance(n, fx.Node) else {} for n in joint.backward_outputs]
        given = [n.meta for n in _inputs(back.module)[:count]]
        shown_back = _signature(back.module, given, range(count), len(made), joint.backward_descs, metas)
        return (shown, shown_back), (fore, back, self._update(later[1]))

    def _update(self, part: Part) -> Stretch:
        """Lower the update: it takes gradients of parameters, then residents, and returns these."""
        captured, emitter = self.captured, self.emitter(backward=False)
        gradients = []
        for position, node in captured.read.items():
            tensor = captured.tensor_of[storages(node)[0]]
            place = part.before.get(tensor, Place.DEVICE)
            gradients.append((position, place))
            emitter.known_as(tensor, node)
            if place is not Place.STORE:
                emitter.add_placeholder(node)
            if place is not Place.DEVICE:
                emitter.add_handle(tensor)
        fixed = tuple(position for position in captured.read if not captured.moves(captured.given[position]))
        for position in fixed:
            emitter.add_placeholder(captured.given[position])
        takes, lent = self.take(emitter, part)
        emitter.emit_at(part.instructions)
        gives, values = self.give(emitter, part, takes, lent)
        return Stretch(emitter.finish(values, []), (), takes, gives, 0, lent, part.before, tuple(gradients), fixed)

    def _crossing(self, backward: Part, forward: Emitter) -> tuple[list[fx.Node], list[int]]:
        """Return what backward needs of forward, without residents: roots on the device, and tensors as handles."""
        captured = self.captured
        read, prefetched = crossing(captured.graph, captured.nodes, [i for _, i in backward.instructions])
        outputs = [node for node in captured.joint.backward_outputs if isinstance(node, fx.Node)]
        needed = dict.fromkeys([*read, *(captured.tensor_of[key] for node in outputs for key in storages(node))])
        saved = [
            root for tensor in needed if tensor not in self.node_of for root in forward.roots_of(tensor)
            if root in forward.values and root.op != "get_attr"
        ]  # fmt: skip
        saved.sort(key=lambda root: bool(root.meta.get(NO_VERSION_CHECK, False)))
        return saved, [t for t in prefetched if t in forward.handles and t not in self.node_of]

    def _gradient(self, backward: Emitter, part: Part, node: object) -> fx.Node | None:
        if not isinstance(node, fx.Node):
            return None
        if node in backward.returned:
            return backward.returned[node]
        tensor = self.captured.tensor_of[storages(node)[0]]
        return backward.handles[tensor] if part.after.get(tensor) is Place.STORE else backward.values.own(node)


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _signature(
    module: fx.GraphModule,
    inputs: Sequence[dict[str, Any]],
    plain: Iterable[int],
    count: int,
    descs: list[Any],
    results: Sequence[dict[str, Any]] | None = None,
) -> fx.GraphModule:
    """Return a module that nobody calls, by which AOTAutograd learns inputs and results of the program in `module`.

    Its inputs have the metadata `inputs`; those in `plain` are the first ones of the program, in order. It returns
    the first `count` results of the program, with the metadata `results` if given.
    """
    graph = fx.Graph()
    placed = []
    for number, meta in enumerate(inputs):
        node = graph.placeholder(f"input_{number}")
        node.meta = dict(meta)
        placed.append(node)
    same = {ours: placed[position] for ours, position in zip(_inputs(module), plain, strict=False)}
    returned: list[Any] = []
    for number, result in enumerate(module.graph.find_nodes(op="output")[0].args[0][:count]):
        if isinstance(result, fx.Node) and result not in same:
            node = graph.call_function(torch.ops.aten.empty.memory_format, ([0],))
            node.meta = dict(result.meta if results is None else results[number])
            same[result] = node
        returned.append(same[result] if isinstance(result, fx.Node) else result)
    graph.output(tuple(returned)).meta["desc"] = list(descs)
    return LazyGraphModule(module, graph)


def lower_stretches(captured: CapturedCutStep, schedule: Schedule, engine: int) -> Lowered:
    """Return what AOTAutograd is shown of forward and backward, and the stretches that carry out `schedule`.

    Transfers go through engine number `engine`.
    """
    return _Lowering(captured, schedule, engine).lowered()
