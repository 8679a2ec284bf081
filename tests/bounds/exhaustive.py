"""The shortest step of all schedules in the graph's order, by search over all of them: for very small graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, combinations

from overspill.core import Device, Graph, Instruction, Schedule, Verb

_ABSENT, _PRESENT, _LEAVING, _ARRIVING = range(4)


@dataclass(frozen=True)
class _State:
    """After `position` ops: for each tensor its state, whether the store has it as it is, and when its transfer ends.

    Times are from now on. `free` is when each direction of the link is.
    """

    position: int
    tensors: tuple[tuple[int, bool, float], ...]
    free: tuple[float, float] = (0.0, 0.0)

    def with_tensor(self, tensor: int, state: int, *, stored: bool, ends: float = 0.0) -> _State:
        entry = (state, stored, ends)
        return replace(self, tensors=(*self.tensors[:tensor], entry, *self.tensors[tensor + 1 :]))

    def later(self, seconds: float) -> _State:
        """The same when some time has passed."""
        tensors = tuple((s, stored, _left(ends, seconds)) for s, stored, ends in self.tensors)
        return _State(self.position, tensors, (_left(self.free[0], seconds), _left(self.free[1], seconds)))


def _left(time: float, passed: float) -> float:
    return round(max(0.0, time - passed), 9)


def shortest(
    graph: Graph, device: Device, budget_bytes: int, seconds: Sequence[float], most_states: int
) -> tuple[float, Schedule] | None:
    """The least seconds within the budget and a schedule that takes them, or None: there is none, or too many states."""
    search = _Search(graph, device, budget_bytes, seconds)
    heap: list[tuple[float, int, int, _State]] = []
    came: dict[tuple[frozenset[int], _State], tuple[tuple[frozenset[int], _State] | None, Instruction | None]] = {}
    best: dict[tuple[frozenset[int], _State], float] = {}
    homes = [t.id for t in graph.tensors if t.persistent and t.movable]
    at_homes = [frozenset(c) for c in chain.from_iterable(combinations(homes, n) for n in range(len(homes) + 1))]
    for number, home in enumerate(at_homes):
        start = search.start(home)
        if search.live(start) <= budget_bytes:
            heappush(heap, (0.0, len(heap), number, start))  # by delay: the time beside what the ops so far take
            best[home, start] = 0.0
            came[home, start] = (None, None)
    count = len(heap)
    while heap:
        delay, _, number, state = heappop(heap)
        home = at_homes[number]
        if delay > best[home, state]:
            continue
        if search.is_over(state, home):
            made: list[Instruction] = []
            at: tuple[frozenset[int], _State] | None = (home, state)
            while at is not None:
                at, instruction = came[at]
                made += [instruction] if instruction is not None else []
            ended = [Instruction(Verb.FREE, t) for t in search.left_over(state)]
            instructions = (*reversed(made), *ended)
            return delay + sum(seconds), Schedule("exhaustive", instructions, budget_bytes, tuple(sorted(home)))
        for instruction, took, after in search.next(state):
            key = (home, after)
            longer = delay + took - (seconds[instruction.target] if instruction.verb is Verb.RUN else 0.0)
            if longer < best.get(key, float("inf")) - 1e-12:
                best[key] = longer
                came[key] = ((home, state), instruction)
                count += 1
                heappush(heap, (longer, count, number, after))
                if count > most_states:
                    return None
    return None


class _Search:
    def __init__(self, graph: Graph, device: Device, budget_bytes: int, seconds: Sequence[float]) -> None:
        self.graph, self.device, self.budget_bytes, self.seconds = graph, device, budget_bytes, seconds
        self.last = [uses[-1] if uses else -1 for uses in graph.uses]
        # An op may run again until something that it reads or makes is updated.
        self.until = []
        for op in graph.ops:
            own = {*op.recompute_reads, *op.recompute_writes}
            later = (o.id for o in graph.ops[op.id + 1 :] if own & set(o.writes))
            self.until.append(next(later, len(graph.ops)) if op.recomputable else -1)
        self.useful = set(graph.outputs) | {t.id for t in graph.tensors if t.persistent}
        self.inputs = {t for op in graph.ops if op.recomputable for t in op.recompute_reads}

    def start(self, home: frozenset[int]) -> _State:
        there = [
            (_PRESENT if t.persistent and t.id not in home else _ABSENT, t.id in home, 0.0) for t in self.graph.tensors
        ]
        return _State(0, tuple(there))

    def live(self, state: _State) -> int:
        return sum(t.nbytes for t, (s, _, _) in zip(self.graph.tensors, state.tensors, strict=True) if s != _ABSENT)

    def left_over(self, state: _State) -> list[int]:
        """Tensors that are there in the end and need not be."""
        return [t for t, (s, _, _) in enumerate(state.tensors) if s == _PRESENT and t not in self.useful]

    def is_over(self, state: _State, home: frozenset[int]) -> bool:
        if state.position < len(self.graph.ops):
            return False
        for tensor in self.graph.tensors:
            where, stored, _ = state.tensors[tensor.id]
            if where in (_LEAVING, _ARRIVING):
                return False
            if tensor.id in home:
                if where != _ABSENT or not stored:
                    return False
            elif tensor.id in self.useful and where != _PRESENT:
                return False
        return True

    def next(self, state: _State) -> Iterator[tuple[Instruction, float, _State]]:
        """What may be done next: the instruction, the seconds that compute takes or waits, the state after it."""
        if (needless := self._needless(state)) is not None:
            yield needless
            return
        yield from self._ops(state)
        live = self.live(state)
        for tensor, (where, stored, ends) in zip(self.graph.tensors, state.tensors, strict=True):
            number = tensor.id
            if where == _PRESENT:
                if tensor.movable and not stored:
                    yield self._transfer(state, number, Verb.OFFLOAD)
                if not tensor.persistent or (stored and tensor.movable):
                    yield Instruction(Verb.FREE, number), 0.0, state.with_tensor(number, _ABSENT, stored=stored)
            elif where == _LEAVING:
                after = state.later(ends).with_tensor(number, _PRESENT, stored=True)
                yield Instruction(Verb.AWAIT_OFFLOAD, number), ends, after
            elif where == _ARRIVING:
                after = state.later(ends).with_tensor(number, _PRESENT, stored=True)
                yield Instruction(Verb.AWAIT_PREFETCH, number), ends, after
            elif stored and self._wanted(number, state.position) and live + tensor.nbytes <= self.budget_bytes:
                yield self._transfer(state, number, Verb.PREFETCH)

    def _wanted(self, tensor: int, position: int) -> bool:
        """Whether an op still to run, or one that may run again, uses `tensor`, or it must be there in the end."""
        if self.last[tensor] >= position or tensor in self.useful:
            return True
        again = (op for op in self.graph.ops[:position] if position <= self.until[op.id])
        return any(tensor in op.recompute_reads for op in again)

    def _needless(self, state: _State) -> tuple[Instruction, float, _State] | None:
        """What may be done at once, for it takes no time and never harms: await what is over, free what is useless."""
        for tensor, (where, stored, ends) in enumerate(state.tensors):
            if where in (_LEAVING, _ARRIVING) and not ends:
                verb = Verb.AWAIT_OFFLOAD if where == _LEAVING else Verb.AWAIT_PREFETCH
                return Instruction(verb, tensor), 0.0, state.with_tensor(tensor, _PRESENT, stored=True)
            if where == _PRESENT and not self._wanted(tensor, state.position):
                return Instruction(Verb.FREE, tensor), 0.0, state.with_tensor(tensor, _ABSENT, stored=stored)
        return None

    def _transfer(self, state: _State, tensor: int, verb: Verb) -> tuple[Instruction, float, _State]:
        way = 0 if verb is Verb.OFFLOAD else 1
        nbytes = self.graph.tensors[tensor].nbytes
        takes = (self.device.prefetch_seconds if way else self.device.offload_seconds)(nbytes)
        ends = round((state.free[way] if self.device.full_duplex else max(state.free)) + takes, 9)
        free = (state.free[0], ends) if way else (ends, state.free[1])
        after = state.with_tensor(tensor, _ARRIVING if way else _LEAVING, stored=bool(way), ends=ends)
        return Instruction(verb, tensor), 0.0, replace(after, free=free)

    def _ops(self, state: _State) -> Iterator[tuple[Instruction, float, _State]]:
        tensors = self.graph.tensors
        for op in self.graph.ops:
            again = op.id < state.position < self.until[op.id] + 1
            if op.id != state.position and not again:
                continue
            reads, writes = (op.recompute_reads, op.recompute_writes) if again else (op.reads, op.writes)
            if any(state.tensors[t][0] not in (_PRESENT, _LEAVING) for t in reads):
                continue
            if not again and any(state.tensors[t][0] in (_LEAVING, _ARRIVING) for t in writes):
                continue
            if again and not any(state.tensors[t][0] == _ABSENT for t in writes):
                continue
            made = [t for t in writes if state.tensors[t][0] == _ABSENT]
            live = self.live(state) + sum(tensors[t].nbytes for t in (writes if again else made))
            for number in range(max(1, len(op.algorithms))):
                if live + op.workspace_of(number) > self.budget_bytes:
                    continue
                took = self.seconds[op.id] * op.slowdown_of(number)
                after = state
                for t in writes:
                    where, stored, ends = state.tensors[t]
                    if again and where != _ABSENT:
                        continue
                    after = after.with_tensor(t, _PRESENT, stored=again and stored, ends=ends)
                after = after.later(took)
                after = after if again else replace(after, position=state.position + 1)
                yield Instruction(Verb.RECOMPUTE if again else Verb.RUN, op.id, number), took, after
