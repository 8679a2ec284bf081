"""Check a Schedule: the reference meaning of instructions, which every plan has to pass.

Each tensor's device copy is in one of four states, and its store copy is valid or not:

    ABSENT ──Run/Recompute that writes it──▶ PRESENT ──Offload──▶ LEAVING ──AwaitOffload──▶ PRESENT (and stored)
    ABSENT ──Prefetch (if stored)──▶ ARRIVING ──AwaitPrefetch──▶ PRESENT ──Free──▶ ABSENT

A persistent tensor starts PRESENT, or in the store if the schedule says so. It is freed only while the store has it.
Movable tensors that no op writes on the device have a copy in the store from the start: an earlier step offloaded them,
or the host updated them. A LEAVING tensor can still be read, not written or freed. An ARRIVING one takes its bytes
already but cannot be read.
Start begins a collective: its results are ARRIVING until its Run or Recompute. Until then the tensors that it reads may
be neither freed nor written. RunOnHost runs an op of the update on copies in the store. They are the current ones of
all that it reads, and none that it writes is on the device; then the store has the new values. This file shares no code
with the policies or with the clocked machine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto

from overspill.core import OF_OPS, Graph, Instruction, Op, Phase, Schedule, Tensor, Verb
from overspill.core.errors import InvalidScheduleError


class _State(Enum):
    ABSENT = auto()
    PRESENT = auto()
    LEAVING = auto()
    ARRIVING = auto()


@dataclass(frozen=True)
class CheckResult:
    """Peak bytes of a valid schedule, with its instruction and live tensors."""

    peak_bytes: int
    peak_instruction: int
    live_at_peak: tuple[int, ...]


def check(graph: Graph, schedule: Schedule) -> CheckResult:
    """Check that `schedule` is valid on `graph`, and return its peak in bytes.

    Raises InvalidScheduleError if it breaks a rule or its budget.
    """
    machine = _Machine(graph, schedule)
    for index, instruction in enumerate(schedule.instructions):
        try:
            machine.execute(instruction, index)
        except InvalidScheduleError as error:
            raise InvalidScheduleError(
                f"{schedule.policy}: instruction {index}, {machine.spell(instruction)}: {error}"
            ) from None
    # The end of the step, and the budget.
    machine.finish(schedule)
    budget = schedule.budget_bytes
    if budget is not None and machine.peak_bytes > budget:
        raise InvalidScheduleError(f"{schedule.policy}: peak {machine.peak_bytes} bytes is over its budget of {budget}")
    return CheckResult(
        machine.peak_bytes, machine.peak_instruction, _live_at(graph, schedule, machine.peak_instruction)
    )


def _live_at(graph: Graph, schedule: Schedule, index: int) -> tuple[int, ...]:
    """Return the tensors on the device during instruction `index`, found by replaying up to it."""
    machine = _Machine(graph, schedule)
    for position, instruction in enumerate(schedule.instructions[: index + 1]):
        machine.execute(instruction, position)
    return tuple(t for t, state in enumerate(machine.state) if state is not _State.ABSENT)


_PHASES = tuple(Phase)


def _versions_in_order(graph: Graph) -> list[tuple[int, ...]]:
    """Return for each op how often its tensors were written before it, in the graph's order."""
    version = [0] * len(graph.tensors)
    seen = []
    for op in graph.ops:
        seen.append(tuple(version[t] for t in op.reads + op.writes))
        for tensor in op.writes:
            version[tensor] += 1
    return seen


class _Machine:
    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.state = [_State.PRESENT if t.persistent else _State.ABSENT for t in graph.tensors]
        on_host = frozenset(schedule.targets(Verb.RUN_ON_HOST))
        written = {t for op in graph.ops for t in op.writes if op.id not in on_host}
        self.stored = {t.id: 0 for t in graph.tensors if t.persistent and t.movable and t.id not in written}
        """The version of each tensor that the store holds."""
        self.version = [0] * len(graph.tensors)
        self.ran: dict[int, tuple[int, ...]] = {}  # op -> versions of what a recomputation would read and make
        self.started: dict[
            int, tuple[int, list[int]]
        ] = {}  # collectives that run: bytes other than results, and the results
        self.held: Counter[int] = Counter()  # tensors that they read
        self.phase = 0
        self.seen = _versions_in_order(graph)
        self.live_bytes = graph.persistent_bytes
        self._ops = {
            Verb.RUN: self._run,
            Verb.RECOMPUTE: self._recompute,
            Verb.START: self._start,
            Verb.RUN_ON_HOST: self._run_on_host,
        }
        # Tensors that are in the store between steps.
        for tensor in schedule.stored:
            if not (graph.tensors[tensor].persistent and graph.tensors[tensor].movable):
                raise InvalidScheduleError(f"{graph.tensors[tensor].name} can not be in the store between steps")
            self.state[tensor] = _State.ABSENT
            self.stored[tensor] = 0
            self.live_bytes -= graph.tensors[tensor].nbytes
        self.peak_bytes = 0
        self.peak_instruction = -1
        self._note_peak(0, -1)

    def execute(self, instruction: Instruction, index: int) -> None:
        """Execute one instruction. Raises InvalidScheduleError."""
        self._find(instruction)
        if (does := self._ops.get(instruction.verb)) is not None:
            does(self.graph.ops[instruction.target], instruction.algorithm, index)
        match instruction.verb:
            # Transfers: tensors keep their bytes until freed, and take them from the start.
            case Verb.OFFLOAD:
                self._move(instruction.target, _State.PRESENT, _State.LEAVING)
            case Verb.AWAIT_OFFLOAD:
                self._move(instruction.target, _State.LEAVING, _State.PRESENT)
                self.stored[instruction.target] = self.version[instruction.target]
            case Verb.PREFETCH:
                if self.stored.get(instruction.target) != self.version[instruction.target]:
                    raise InvalidScheduleError("the store holds no copy, or one from before the tensor was updated")
                self._move(instruction.target, _State.ABSENT, _State.ARRIVING)
                self._allocate(instruction.target, index)
            case Verb.AWAIT_PREFETCH:
                self._move(instruction.target, _State.ARRIVING, _State.PRESENT)
            case Verb.FREE:
                self._may_free(self.graph.tensors[instruction.target])
                self._not_held((instruction.target,))
                self._move(instruction.target, _State.PRESENT, _State.ABSENT)
                self.live_bytes -= self.graph.tensors[instruction.target].nbytes

    def finish(self, schedule: Schedule) -> None:
        """Check that every op ran and only wanted tensors are left. Raises InvalidScheduleError."""
        if missing := next((op for op in self.graph.ops if op.id not in self.ran), None):
            raise InvalidScheduleError(f"{schedule.policy}: op {missing.name} never ran")
        # Tensors stored between steps have their last values in the store.
        for tensor in schedule.stored:
            if self.stored[tensor] != self.version[tensor]:
                name = self.graph.tensors[tensor].name
                raise InvalidScheduleError(f"{schedule.policy}: the store ends with {name} from before its last update")
        if self.started:
            name = self.graph.ops[min(self.started)].name
            raise InvalidScheduleError(f"{schedule.policy}: nothing waits for the collective {name}")
        # Persistent tensors and outputs are there, unless the schedule stores them; nothing else is.
        wanted = {t.id for t in self.graph.tensors if t.persistent} | set(self.graph.outputs)
        wanted -= set(schedule.stored)
        for tensor, state in enumerate(self.state):
            expected = _State.PRESENT if tensor in wanted else _State.ABSENT
            if state is not expected:
                name = self.graph.tensors[tensor].name
                raise InvalidScheduleError(
                    f"{schedule.policy}: {name} ends {state.name.lower()}, not {expected.name.lower()}"
                )

    def _may_free(self, tensor: Tensor) -> None:
        if tensor.id in self.graph.returned:
            raise InvalidScheduleError("the tensor is an output, which the caller holds once it is there")
        if not tensor.persistent:
            return
        if not tensor.movable:
            raise InvalidScheduleError("the tensor belongs to the caller")
        if self.stored.get(tensor.id) != self.version[tensor.id]:
            raise InvalidScheduleError("the tensor outlives the step and the store does not hold it as it is now")

    def _run(self, op: Op, algorithm: int, index: int) -> None:
        """Run an op, in any order in which it sees the same versions as in the graph's."""
        self._need(op.reads)
        self._in_order(op)
        # New tensors appear; others must not be in transfer.
        started = self._end(op, index)
        self._not_held(op.writes)
        for tensor in op.writes:
            if self.state[tensor] is _State.ABSENT:
                self.state[tensor] = _State.PRESENT
                self._allocate(tensor, index)
            elif self.state[tensor] is not _State.PRESENT:
                raise InvalidScheduleError(f"writes {self.graph.tensors[tensor].name} while it is in transfer")
            self.version[tensor] += 1
        self.ran[op.id] = self._versions(op)
        if not started:
            self._note_peak(self._workspace(op, algorithm), index)

    def _run_on_host(self, op: Op, _algorithm: int, _index: int) -> None:
        """Run an op of the update on the copies in the store."""
        if op.phase is not Phase.UPDATE or op.collective is not None:
            raise InvalidScheduleError("the host runs updates alone")
        self._in_order(op)
        for tensor in op.reads:
            if self.stored.get(tensor) != self.version[tensor]:
                name = self.graph.tensors[tensor].name
                raise InvalidScheduleError(f"reads {name}, of which the store holds no copy, or an old one")
        for tensor in op.writes:
            if self.state[tensor] is not _State.ABSENT:
                name, state = self.graph.tensors[tensor].name, self.state[tensor].name.lower()
                raise InvalidScheduleError(f"writes {name}, which is {state} on the device")
            self.version[tensor] += 1
            self.stored[tensor] = self.version[tensor]
        self.ran[op.id] = self._versions(op)

    def _in_order(self, op: Op) -> None:
        """Check that an op has not run, and reads and writes the versions that it has in the graph's order."""
        phase = _PHASES.index(op.phase)
        if op.id in self.ran:
            raise InvalidScheduleError(f"op {op.id} is out of order: it ran before")
        if phase < self.phase and not self.graph.whole_step:
            raise InvalidScheduleError(f"op {op.id} is out of order: it belongs to the {op.phase} phase, which is over")
        self.phase = phase
        if tuple(self.version[t] for t in op.reads + op.writes) != self.seen[op.id]:
            raise InvalidScheduleError(
                f"op {op.id} is out of order: what it reads or writes is not as the graph has it there"
            )

    def _recompute(self, op: Op, algorithm: int, index: int) -> None:
        if not op.recomputable:
            raise InvalidScheduleError("the op may not be recomputed")
        if op.id not in self.ran:
            raise InvalidScheduleError("the op has not run yet")
        self._need(op.recompute_reads)
        # It must read and make the versions of its first run.
        if self.ran[op.id] != self._versions(op):
            raise InvalidScheduleError("what it reads or makes has been updated since the op ran")
        if self._end(op, index):
            return
        self._not_held(op.recompute_writes)
        again = 0
        for tensor in op.recompute_writes:
            if self.state[tensor] is _State.ABSENT:
                self.state[tensor] = _State.PRESENT
                self._allocate(tensor, index)
            else:
                again += self.graph.tensors[tensor].nbytes  # made a second time and dropped at once
        self._note_peak(self._workspace(op, algorithm) + again, index)

    def _start(self, op: Op, algorithm: int, index: int) -> None:
        """Begin a collective that makes new tensors."""
        again = op.id in self.ran
        reads, writes = (op.recompute_reads, op.recompute_writes) if again else (op.reads, op.writes)
        if op.collective is None or set(reads) & set(writes):
            raise InvalidScheduleError("the op is no collective that makes new tensors")
        if op.id in self.started:
            raise InvalidScheduleError("the collective runs already")
        if again and not op.recomputable:
            raise InvalidScheduleError("the op may not be recomputed")
        self._need(reads)
        besides, made = self._workspace(op, algorithm), []
        for tensor in writes:
            if self.state[tensor] is _State.ABSENT:
                self.state[tensor] = _State.ARRIVING
                self._allocate(tensor, index)
                made.append(tensor)
            elif again:
                besides += self.graph.tensors[tensor].nbytes  # made a second time and dropped at once
            else:
                raise InvalidScheduleError(f"writes {self.graph.tensors[tensor].name} while it is in transfer")
        self.started[op.id] = besides, made
        self.held.update(reads)
        self.live_bytes += besides
        self._note_peak(0, index)

    def _end(self, op: Op, index: int) -> bool:
        """Wait for a collective if it has been started, and return whether it had."""
        if op.id not in self.started:
            return False
        self._note_peak(0, index)
        besides, made = self.started.pop(op.id)
        self.live_bytes -= besides
        self.held.subtract(op.recompute_reads if op.id in self.ran else op.reads)
        for tensor in made:
            self.state[tensor] = _State.PRESENT
        return True

    def _not_held(self, tensors: tuple[int, ...]) -> None:
        if (held := next((t for t in tensors if self.held[t] > 0), None)) is not None:
            raise InvalidScheduleError(f"a collective that runs reads {self.graph.tensors[held].name}")

    def _workspace(self, op: Op, algorithm: int) -> int:
        if algorithm == 0:
            return op.workspace_bytes
        if not 0 < algorithm < len(op.algorithms):
            raise InvalidScheduleError(f"the op has no algorithm {algorithm}")
        return op.algorithms[algorithm].workspace_bytes

    def _versions(self, op: Op) -> tuple[int, ...]:
        return tuple(self.version[t] for t in op.recompute_reads + op.recompute_writes)

    def _need(self, tensors: tuple[int, ...]) -> None:
        for tensor in tensors:
            if self.state[tensor] not in (_State.PRESENT, _State.LEAVING):
                raise InvalidScheduleError(
                    f"reads {self.graph.tensors[tensor].name}, which is {self.state[tensor].name.lower()}"
                )

    def _move(self, tensor: int, before: _State, after: _State) -> None:
        if self.state[tensor] is not before:
            raise InvalidScheduleError(f"the tensor is {self.state[tensor].name.lower()}, not {before.name.lower()}")
        self.state[tensor] = after

    def _allocate(self, tensor: int, index: int) -> None:
        self.live_bytes += self.graph.tensors[tensor].nbytes
        self._note_peak(0, index)

    def _note_peak(self, extra_bytes: int, index: int) -> None:
        if self.live_bytes + extra_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes + extra_bytes
            self.peak_instruction = index

    def _find(self, instruction: Instruction) -> Op | Tensor:
        among: tuple[Op, ...] | tuple[Tensor, ...] = self.graph.tensors
        if instruction.verb in OF_OPS:
            among = self.graph.ops
        if not 0 <= instruction.target < len(among):
            raise InvalidScheduleError(f"there is no {instruction.target} in this graph")
        return among[instruction.target]

    def spell(self, instruction: Instruction) -> str:
        """Return the instruction as text: verb and target."""
        try:
            return f"{instruction.verb} {self._find(instruction).name}"
        except InvalidScheduleError:
            return f"{instruction.verb} {instruction.target}"
