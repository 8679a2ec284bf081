"""Updates on the host: the step without them, which policies plan, and its schedule with them.

An update on the host needs its gradient in the store, and gives the store a new weight. What is left for the device is
a step in which no op writes these weights and none reads their state. Gradients leave as soon as they are complete.
Compute waits for them only if memory is short, and starts each update once its gradient is there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from overspill.core import (
    MOST_TOGETHER,
    OF_OPS,
    Device,
    Graph,
    Instruction,
    Op,
    Phase,
    Schedule,
    Stream,
    TensorKind,
    Timeline,
    Verb,
    numbered,
)  # fmt: skip
from overspill.simulate import simulate

from .fastest import fastest
from .order import in_graph_order
from .overlap import computing_seconds

EARLY = 1.2
"""A weight comes back so many times its own duration ahead of its first reader, because others may be late."""
NEVER = float("inf")


def may_run_on_host(graph: Graph, op: Op) -> bool:
    """Return whether the host may run an op of the update: no op that follows uses what it writes."""
    tensors = graph.tensors
    return (
        op.phase is Phase.UPDATE
        and op.collective is None
        and any(tensors[t].persistent for t in op.writes)
        and all(tensors[t].movable and graph.uses[t][-1] == op.id for t in op.writes)
        and all(tensors[t].movable for t in op.reads)
    )


def updates_of(graph: Graph) -> tuple[int, ...]:
    """Return the updates of a step that the host may run, in the order in which their gradients are complete."""

    def complete(op: int) -> int:
        return max((w for t in graph.ops[op].reads for w in graph.written_by[t] if w < op), default=-1)

    found = [op.id for op in graph.ops if may_run_on_host(graph, op)]
    return tuple(sorted(found, key=lambda op: (complete(op), op)))


def seconds_on_host(graph: Graph, op: Op, device: Device) -> float:
    """Return the least that an update takes on the host: a small one may be in a call with others."""
    joins = not device.host_bytes and graph.is_small_on_host(op)
    return device.host_update_seconds(graph.moved_on_host_bytes(op), joins=joins)


def without(graph: Graph, updates: Collection[int]) -> tuple[Graph, tuple[int, ...]]:
    """Return the step without `updates` and the state that they alone use, and the ids of its ops in `graph`.

    Tensors keep their ids. Those that are gone have no bytes.
    """
    gone = frozenset(updates)
    kept = tuple(op.id for op in graph.ops if op.id not in gone)
    tensors = [
        replace(t, nbytes=0, movable=False) if (uses := graph.uses[t.id]) and gone.issuperset(uses) else t
        for t in graph.tensors
    ]
    return replace(graph, tensors=tuple(tensors), ops=numbered(graph.ops[op] for op in kept)), kept


class HostUpdates:
    """`updates` of `graph` to run on the host of `device`; op `i` takes `seconds[i]` on the device."""

    def __init__(self, graph: Graph, updates: Collection[int], device: Device, seconds: Sequence[float]) -> None:
        self.graph, self.device, self.all_seconds = graph, device, seconds
        self.rest, self.kept = without(graph, updates)
        """The step without the updates, and the ids of its ops in `graph`."""
        self.seconds = tuple(seconds[op] for op in self.kept)
        self.updates = [graph.ops[op] for op in updates]
        self.weights = frozenset(t for op in self.updates for t in op.writes if graph.tensors[t].persistent)
        """What they write: weights and state."""

    def least_seconds(self, budget_bytes: int | None) -> float:
        """Return a bound on the step within a budget, the largest of what the processors, the link and the disk do."""
        device, graph, rest = self.device, self.graph, self.rest
        nbytes = [t.nbytes for t in graph.tensors]
        host = sum(seconds_on_host(graph, op, device) for op in self.updates)
        # Gradients leave, and weights come back.
        read = {t for op in self.updates for t in op.reads} - self.weights
        out = sum(nbytes[t] for t in read if rest.written_by[t])
        link = device.link_seconds(out, sum(nbytes[t] for t in self.weights if rest.uses[t]))
        bounds = [sum(computing_seconds(rest, self.seconds)), host, link]
        if device.host_bytes:
            # Between steps the store has all that the host writes, and what is more than the budget.
            written = max(0, sum(nbytes[t] for t in self.weights) - device.host_bytes)
            beyond = 0 if budget_bytes is None else max(0, graph.persistent_bytes - budget_bytes - device.host_bytes)
            clean = sum(t.nbytes for t in graph.tensors if t.persistent and not graph.written_by[t.id])
            bounds += [device.disk_seconds(written, written), device.disk_seconds(beyond, max(0, beyond - clean))]
        return max(bounds)

    def schedule(self, planned: Schedule, budget_bytes: int | None) -> Schedule:
        """Return `planned`, a schedule of `rest`, with the updates: the faster of two ways.

        A weight that the device has memory for all the time comes back in the same step if the host is done in time, or
        always in the next one.
        """
        before = in_graph_order(planned, self.kept)
        timeline = simulate(self.rest, planned, self.device, self.seconds)
        # When the gradients arrive if nothing waits for them.
        first = _Insertion(self, before, timeline.live_bytes, timeline.clock_seconds, {}, None, same_step=False)
        first.schedule()
        made = [(index, i) for index, i in first.made if i.verb is not Verb.RUN_ON_HOST]
        at_last = replace(before, instructions=tuple(i for _, i in made))
        moving = simulate(self.graph, at_last, self.device, self.all_seconds)
        clock = dict(zip((index for index, _ in made), moving.clock_seconds, strict=True))
        times = [clock.get(index, 0.0) for index in range(len(before.instructions))]
        arrivals = {e.target: e.end_seconds for e in moving.events if e.stream is Stream.OFFLOAD}
        ways = (
            _Insertion(self, before, timeline.live_bytes, times, arrivals, budget_bytes, same_step=way).schedule()
            for way in (True, False)
        )
        chosen = fastest(self.graph, self.device, self.all_seconds, ways, None)
        assert chosen is not None
        return replace(chosen, budget_bytes=budget_bytes)


@dataclass
class _Leaving:
    """A tensor on its way to the store, from when on it is there; `freed`: nothing on the device needs it any more."""

    tensor: int
    arrival: float
    freed: bool = False


@dataclass
class _Insertion:
    """Inserts updates on the host into the schedule `before`, which has the ids of the whole graph.

    `live` and `clock` are the most bytes during each of its instructions, and the time after it. `arrivals` are those
    of copies in the store.
    """

    of: HostUpdates
    before: Schedule
    live: Sequence[int]
    clock: Sequence[float]
    arrivals: Mapping[int, float]
    limit: int | None
    same_step: bool
    made: list[tuple[int, Instruction]] = field(default_factory=list)
    """The instructions so far, each with the index of that of `before` at which it is."""
    leaving: list[_Leaving] = field(default_factory=list)
    held: int = 0
    """Bytes that are on the device only because they are leaving."""
    index: int = 0
    host_free: float = 0.0
    updated: list[tuple[float, int]] = field(default_factory=list)
    """Resident weights that the host has been given, with when it is done."""
    back: list[int] = field(default_factory=list)
    """Those that come back in this step."""
    small: list[Op] = field(default_factory=list)
    """Small updates that wait for others."""
    of_loop: list[int] = field(default_factory=list)
    """Updates that wait until the user's loop steps, because the step is cut there."""

    def __post_init__(self) -> None:
        """Find what each update waits for: tensors that reach the store, and weights that leave the device."""
        self.first: dict[int, int] = {}  # instruction that uses a tensor on the device
        self.last: dict[int, int] = {}
        self.complete: dict[int, int] = {}  # the last that writes it
        for index, instruction in enumerate(self.before.instructions):
            if instruction.verb in OF_OPS:
                self._note_use(instruction, index)
        needed = {t for op in self.of.updates for t in op.reads} - self.of.weights
        self.sent = {t: index for t, index in self.complete.items() if t in needed}
        # Copies that the schedule makes by itself.
        self.own = {
            i.target
            for index, i in enumerate(self.before.instructions)
            if i.verb is Verb.OFFLOAD and index > self.sent.get(i.target, len(self.before.instructions))
        }
        self.resident = sorted(t for t in self.of.weights if t in self.first and t not in self.before.stored)
        self.waits = {op.id: {t for t in op.reads + op.writes if t in self._awaited} for op in self.of.updates}
        self.waiting: dict[int, list[Op]] = defaultdict(list)
        for op in self.of.updates:
            for tensor in self.waits[op.id]:
                self.waiting[tensor].append(op)

    @cached_property
    def _awaited(self) -> set[int]:
        return {*self.sent, *(t for t in self.of.weights if t in self.first)}

    def _note_use(self, instruction: Instruction, index: int) -> None:
        op, again = self.of.graph.ops[instruction.target], instruction.verb is Verb.RECOMPUTE
        reads, writes = (op.recompute_reads, op.recompute_writes) if again else (op.reads, op.writes)
        for tensor in reads + writes:
            self.first.setdefault(tensor, index)
            self.last[tensor] = index
        if instruction.verb is Verb.RUN:
            self.complete.update(dict.fromkeys(writes, index))

    def schedule(self) -> Schedule:
        """Return the schedule with the updates."""
        for index, instruction in enumerate(self.before.instructions):
            self.index = index
            self._step(instruction)
        self.index = len(self.before.instructions)
        while self.leaving:
            self._arrive()
        self._update_small(self.clock[-1])
        for op in sorted(self.of_loop, key=lambda op: self.of.graph.is_small_on_host(self.of.graph.ops[op])):
            self._add(Verb.RUN_ON_HOST, op)
        for tensor in self.back:
            self._add(Verb.AWAIT_PREFETCH, tensor)
        returns = self._returns([t for t in self.resident if t not in self.back])
        at_start: list[Instruction] = []
        last = -1
        for index, instruction in self.made:
            for passed in range(last + 1, index + 1):
                at_start += returns.pop(passed, ())
            last = max(last, index)
            at_start.append(instruction)
        stored = {*self.before.stored, *self.of.weights}.difference(self.back)
        return replace(self.before, instructions=tuple(at_start), stored=tuple(sorted(stored)))

    def _step(self, instruction: Instruction) -> None:
        """Carry out an instruction, after the transfers and updates that go before it."""
        verb, target = instruction.verb, instruction.target
        now = self.clock[self.index - 1] if self.index else 0.0
        while self.leaving and self.leaving[0].arrival <= now:
            self._arrive()
        while self.limit is not None and self.held and self.held + self.live[self.index] > self.limit:
            self._arrive()
        self._come_back(now)
        if verb is Verb.FREE and (leaves := next((one for one in self.leaving if one.tensor == target), None)):
            leaves.freed = True
            self.held += self._bytes(target)
            return
        self.made.append((self.index, instruction))
        if verb in OF_OPS:
            self._after(self.of.graph.ops[target])
        elif (verb is Verb.AWAIT_OFFLOAD and target in self.own and not self._is_written(target)) or (
            verb is Verb.FREE and target in self._awaited and self.index > self.last[target]
        ):
            self._ready(target)

    def _after(self, op: Op) -> None:
        """Send what an op has completed, and free weights that it was the last to read."""
        for tensor in dict.fromkeys(op.reads + op.writes):
            if self.sent.get(tensor) == self.index and tensor not in self.own:
                self._add(Verb.OFFLOAD, tensor)
                self.leaving.append(_Leaving(tensor, self.arrivals.get(tensor, NEVER)))
            if self.last.get(tensor) == self.index and tensor in self._resident:
                self._add(Verb.FREE, tensor)
                self._ready(tensor)

    @cached_property
    def _resident(self) -> frozenset[int]:
        return frozenset(self.resident)

    def _arrive(self) -> None:
        """Wait for the copy that has been on its way for longest."""
        first = self.leaving.pop(0)
        self._add(Verb.AWAIT_OFFLOAD, first.tensor)
        if first.freed:
            self._add(Verb.FREE, first.tensor)
            self.held -= self._bytes(first.tensor)
        if first.freed or not self._is_written(first.tensor):
            self._ready(first.tensor)

    def _is_written(self, tensor: int) -> bool:
        """Return whether an update writes `tensor`, which must then have left the device."""
        return any(tensor in op.writes for op in self.waiting[tensor])

    def _ready(self, tensor: int) -> None:
        """Start the updates that waited for `tensor` alone."""
        now = self.clock[min(self.index, len(self.clock)) - 1]
        for op in self.waiting[tensor]:
            waits = self.waits[op.id]
            if tensor in waits and len(waits) == 1 and not self.of.graph.whole_step:
                self.of_loop.append(op.id)
            elif tensor in waits and len(waits) == 1:
                self._update(op, now)
            waits.discard(tensor)

    def _update(self, op: Op, now: float) -> None:
        """Start an update; a small one that takes less than its call, once there are others for that."""
        device, graph = self.of.device, self.of.graph
        seconds = device.host_update_seconds(graph.moved_on_host_bytes(op))
        if not device.host_bytes and graph.is_small_on_host(op) and seconds <= 2 * device.host_update_seconds(0):
            self.small.append(op)
            if len(self.small) == MOST_TOGETHER:
                self._update_small(now)
            return
        self._start(op, now, seconds)

    def _update_small(self, now: float) -> None:
        """Start the small updates that wait, in one call."""
        device, graph = self.of.device, self.of.graph
        for place, op in enumerate(self.small):
            self._start(op, now, device.host_update_seconds(graph.moved_on_host_bytes(op), joins=place > 0))
        self.small.clear()

    def _start(self, op: Op, now: float, seconds: float) -> None:
        self._add(Verb.RUN_ON_HOST, op.id)
        self.host_free = max(now, self.host_free) + seconds
        self.updated += [(self.host_free, t) for t in op.writes if t in self._resident]

    def _come_back(self, now: float) -> None:
        """Bring back weights that the host has updated and the device has memory for, if they arrive in this step."""
        while self.same_step and self.updated and self.updated[0][0] <= now:
            _, tensor = self.updated.pop(0)
            if now + self.of.device.prefetch_seconds(self._bytes(tensor)) <= self.clock[-1]:
                self.back.append(tensor)
                self._add(Verb.PREFETCH, tensor)

    def _returns(self, late: Sequence[int]) -> dict[int, list[Instruction]]:
        """Return by instruction what goes before it, so that `late` weights come back at the beginning of a step."""
        starts: dict[int, float] = {}
        following = NEVER
        for tensor in sorted(late, key=lambda t: -self.first[t]):
            read = self.clock[self.first[tensor] - 1] if self.first[tensor] else 0.0
            following = min(read, following) - EARLY * self.of.device.prefetch_seconds(self._bytes(tensor))
            starts[tensor] = following
        found: dict[int, list[Instruction]] = defaultdict(list)
        at = 0
        for tensor in sorted(late, key=lambda t: self.first[t]):
            while at < self.first[tensor] and self.clock[at] < starts[tensor]:
                at += 1
            found[at].append(Instruction(Verb.PREFETCH, tensor))
        for tensor in late:
            found[self.first[tensor]].append(Instruction(Verb.AWAIT_PREFETCH, tensor))
        return found

    def _bytes(self, tensor: int) -> int:
        return self.of.graph.tensors[tensor].nbytes

    def _add(self, verb: Verb, target: int) -> None:
        self.made.append((self.index, Instruction(verb, target)))


def balanced(
    graph: Graph, schedule: Schedule, device: Device, seconds: Sequence[float], disk_seconds: float = 0.0
) -> tuple[int, ...]:
    """Return the updates of `schedule`, all on the device, with which on the host its busiest lane is done soonest.

    They are those first complete whose state moves. Lanes are compute, the host's updates, and the link each way. The
    disk is busy for `disk_seconds` wherever updates run.
    """
    nbytes = [t.nbytes for t in graph.tensors]
    moved: dict[Verb, Counter[int]] = {v: Counter(schedule.targets(v)) for v in (Verb.OFFLOAD, Verb.PREFETCH)}
    out, back = (sum(nbytes[t] * times for t, times in moved[verb].items()) for verb in moved)
    computing, on_host = sum(computing_seconds(graph, seconds)), 0.0
    found: list[int] = []

    def busiest() -> float:
        return max(computing, on_host, disk_seconds, device.link_seconds(out, back))

    least, best = busiest(), 0
    for op in (graph.ops[number] for number in updates_of(graph)):
        gradients = {*op.reads}.difference(op.writes)
        state = {t for t in op.writes if graph.tensors[t].kind is TensorKind.OPTIMIZER_STATE}
        less = sum(nbytes[t] * (moved[Verb.OFFLOAD][t] - (t in gradients)) for t in gradients.union(op.writes))
        fewer = sum(nbytes[t] * moved[Verb.PREFETCH][t] for t in state | gradients)
        if less + fewer <= 0:
            continue
        out, back, computing = out - less, back - fewer, computing - seconds[op.id]
        on_host += seconds_on_host(graph, op, device)
        found.append(op.id)
        if (busy := busiest()) < least:
            least, best = busy, len(found)
    return tuple(found[:best])


def in_time(graph: Graph, made: Schedule, timeline: Timeline) -> tuple[int, ...]:
    """Return the updates of a plan that the host ends in the step, and that the next step need not wait for."""
    waiting = f"{Stream.HOST_UPDATE} of"
    waited = {made.instructions[stall.instruction].target for stall in timeline.stalls if waiting in stall.cause}
    ends = {e.target: e.end_seconds for e in timeline.events if e.verb is Verb.RUN_ON_HOST}
    return tuple(
        op
        for op in updates_of(graph)
        if ends.get(op, NEVER) <= timeline.step_seconds and waited.isdisjoint(graph.ops[op].writes)
    )


def begun_when_free(graph: Graph, schedule: Schedule, timeline: Timeline) -> Schedule:
    """Return `schedule` with each update where the host begins it by `timeline`, if nothing needs it before.

    What an update reads need not be in host memory earlier, and the disk below brings first what is needed first.
    """
    starts = {e.instruction: e.start_seconds for e in timeline.events if e.verb is Verb.RUN_ON_HOST}
    made: list[Instruction] = []
    waiting: list[tuple[float, Instruction]] = []
    now = 0.0
    for index, instruction in enumerate(schedule.instructions):
        if index in starts:
            waiting.append((starts[index], instruction))
            continue
        touched = {instruction.target}
        if instruction.verb in OF_OPS:
            touched = {*graph.ops[instruction.target].writes}
        needed = [
            at for at, (start, update) in enumerate(waiting)
            if start <= now or not touched.isdisjoint((op := graph.ops[update.target]).reads + op.writes)
        ]  # fmt: skip
        behind = max(needed, default=-1) + 1
        made += [update for _, update in waiting[:behind]]
        del waiting[:behind]
        made.append(instruction)
        now = timeline.clock_seconds[index]
    return replace(schedule, instructions=(*made, *(update for _, update in waiting)))
