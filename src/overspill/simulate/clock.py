"""Simulate a Schedule on a Device: compute stream, two copy streams, that of collectives, host, and its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from overspill.core import HOST, Device, Event, Graph, Instruction, Schedule, Stall, Stream, Tiers, Timeline, Verb
from overspill.core.errors import RequestError

from .disk import DiskLane

STEPS = 12
"""The most steps in a row that are simulated until one begins as the step before it."""
STEPS_WITH_DISK = 3
"""Steps in a row with a disk, which works for a step in the one before it, too."""
SAME = 1e-9
"""The share of a step by which two steps may begin differently."""


def simulate(
    graph: Graph, schedule: Schedule, device: Device, seconds: Sequence[float], tiers: Tiers | None = None
) -> Timeline:
    """Return the Timeline of `schedule` on `device`; op `i` takes `seconds[i]` by itself.

    Transfers of one direction follow one another; on a half-duplex link those of both directions do. A transfer starts
    when it is issued and the link is free. While it runs, ops are slowed down by the device's `transfer_compute_share`.
    Collectives do the same on a stream of their own: compute waits for one where its op runs.

    The host issues one instruction after another, and nothing starts before it is issued. An op takes the host the
    device's `op_overhead_seconds` (part of the op's own time too), a transfer its `transfer_host_seconds`. A GPU runs
    behind its host, which never waits. A CPU runs ops itself, so transfers hold up compute there.

    Updates on the host may reach into the next step, which then waits for what it needs of them. The Timeline is that
    of a step in a row of equal steps, once each begins with as much left to do. If STEPS steps do not get there, it is
    the first one, which then ends with its updates: no row of steps takes longer.

    With `tiers`, copies go on to a disk below the store. Transfers and updates on the host then wait for their copies,
    transfers also for space in host memory, and so does a GPU's host. The Timeline is that of the last of several steps
    in a row.
    """
    if schedule.counts[Verb.RUN_ON_HOST] and not device.host_update_bytes_per_second:
        raise RequestError(
            f"how fast the host of {device.name} updates weights is unknown: its device file has no "
            "host_update_bytes_per_second, which `overspill calibrate` measures here"
        )
    if tiers is not None:
        return _with_disk(graph, schedule, device, seconds, tiers)
    first = clock = _Clock(graph, device, seconds, schedule)
    for _ in range(STEPS if schedule.counts[Verb.RUN_ON_HOST] else 1):
        left = clock.left()
        if clock.began_with(left):
            return clock.timeline()
        clock = _Clock(graph, device, seconds, schedule, left)
    made = first.timeline()
    return replace(made, step_seconds=max([made.step_seconds, *(e.end_seconds for e in made.events)]))


def _with_disk(graph: Graph, schedule: Schedule, device: Device, seconds: Sequence[float], tiers: Tiers) -> Timeline:
    disk = DiskLane(device, tiers, [tensor.nbytes for tensor in graph.tensors])
    left: Mapping[tuple[Stream, int], float] = {}
    for _ in range(STEPS_WITH_DISK):
        clock = _Clock(graph, device, seconds, schedule, left, disk)
        left = clock.left()
        clock.events += disk.next_step(clock.end)
    return clock.timeline()


class _Clock:
    """One step on the clock; `behind` has the seconds from its start until the host is done, as `left` has."""

    def __init__(
        self,
        graph: Graph,
        device: Device,
        seconds: Sequence[float],
        schedule: Schedule,
        behind: Mapping[tuple[Stream, int], float] | None = None,
        disk: DiskLane | None = None,
    ) -> None:
        self.disk = disk
        self.joined = schedule.joined(graph) if disk is None else frozenset[int]()
        self.graph = graph
        self.nbytes = [tensor.nbytes for tensor in graph.tensors]
        self.device = device
        self.seconds = seconds
        self.now = 0.0
        self.host = 0.0
        self.link_free = {Stream.OFFLOAD: 0.0, Stream.PREFETCH: 0.0}
        self.communication_free = 0.0
        # Collectives that run: until when, and their bytes other than results.
        self.flying: dict[int, tuple[float, int]] = {}
        self.running: list[tuple[float, float]] = []  # transfers that have not ended before now
        self.arrival: dict[tuple[Stream, int], float] = {}
        # Until when the host reads or writes a tensor's copy in the store: copies there or back wait for it.
        self.behind = behind or {}
        self.updated = dict(self.behind)
        self.host_free = max(self.updated.values(), default=0.0)
        self.held: dict[tuple[Stream, int], float] = {}  # transfers that waited for it
        self.present = {t.id for t in graph.tensors if t.persistent} - set(schedule.stored)
        self.bytes = graph.persistent_bytes - sum(graph.tensors[t].nbytes for t in schedule.stored)
        self.ran: set[int] = set()  # collectives that have ended once
        self.events: list[Event] = []
        self.stalls: list[Stall] = []
        self.live: list[int] = []
        self.times: list[float] = []
        for index, instruction in enumerate(schedule.instructions):
            if disk is not None and index in disk.starts:
                disk.before(index, self.host if device.runs_behind_host else self.now, self.arrival, self.updated)
            self.step(index, instruction)
            if disk is not None and index in disk.ends:
                disk.behind(index, self.arrival, self.updated)

    @property
    def end(self) -> float:
        """The seconds of the step, without updates on the host that reach into the next one."""
        return max(self.now, self.host)

    def left(self) -> dict[tuple[Stream, int], float]:
        """Return the seconds from the end of the step until the host has read or written each tensor."""
        return {key: until - self.end for key, until in self.updated.items() if until > self.end}

    def began_with(self, left: Mapping[tuple[Stream, int], float]) -> bool:
        """Return whether the step began with the updates `left`."""
        return left.keys() == self.behind.keys() and all(
            abs(left[key] - self.behind[key]) <= SAME * self.end for key in left
        )

    def timeline(self) -> Timeline:
        """Return the step's Timeline."""
        return Timeline(tuple(self.events), tuple(self.stalls), tuple(self.live), self.end, tuple(self.times))

    def step(self, index: int, instruction: Instruction) -> None:
        """Advance the clock by one instruction."""
        verb, target = instruction.verb, instruction.target
        peak = self.bytes
        if verb is Verb.FREE:  # the most frequent, and so the first
            if target in self.present:
                self.present.remove(target)
                self.bytes -= self.nbytes[target]
        elif verb is Verb.RUN or verb is Verb.RECOMPUTE:
            # Compute, then transfers and waits for them.
            communicates = self.graph.ops[target].collective is not None
            peak = (self._end if communicates else self._compute)(index, instruction)
        elif verb is Verb.START:
            peak = self._start(index, instruction, again=target in self.ran)
        elif verb is Verb.RUN_ON_HOST:
            self._run_on_host(index, instruction)
        elif verb is Verb.OFFLOAD:
            self._transfer(index, instruction, Stream.OFFLOAD, self.device.offload_seconds(self.nbytes[target]))
        elif verb is Verb.PREFETCH:
            self._appear((target,))
            peak = self.bytes
            self._transfer(index, instruction, Stream.PREFETCH, self.device.prefetch_seconds(self.nbytes[target]))
        elif verb is Verb.AWAIT_OFFLOAD:
            self._wait(index, target, Stream.OFFLOAD)
        elif verb is Verb.AWAIT_PREFETCH:
            self._wait(index, target, Stream.PREFETCH)
        self.live.append(peak)
        self.times.append(self.now)

    def _start(self, index: int, instruction: Instruction, *, again: bool) -> int:
        """Begin a collective, and return the bytes on the device from then on."""
        op = self.graph.ops[instruction.target]
        writes = op.recompute_writes if again else op.writes
        besides = op.workspace_of(instruction.algorithm)
        besides += sum(self.nbytes[t] for t in writes if t in self.present) if again else 0
        self._appear(writes)
        if self.device.runs_behind_host:
            self.host += self.device.op_overhead_seconds
        start = max(self.now, self.host, self.communication_free)
        end = start + self.seconds[op.id] * op.slowdown_of(instruction.algorithm)
        self.communication_free = end
        self.running.append((start, end))
        self.events.append(Event(index, instruction.verb, op.id, Stream.COMMUNICATION, start, end))
        self.flying[op.id] = end, besides
        self.bytes += besides
        return self.bytes

    def _end(self, index: int, instruction: Instruction) -> int:
        """Wait for a collective, which begins here if it has not, and return the most bytes on the device meanwhile."""
        op = self.graph.ops[instruction.target]
        if op.id not in self.flying:
            self._start(index, instruction, again=instruction.verb is Verb.RECOMPUTE)
        self.ran.add(op.id)
        until, besides = self.flying.pop(op.id)
        self._wait_until(index, until, f"{op.collective.kind if op.collective else op.name} of {op.layer or op.name}")
        self.bytes -= besides
        return self.bytes + besides

    def _appear(self, tensors: Sequence[int]) -> None:
        for tensor in tensors:
            if tensor not in self.present:
                self.present.add(tensor)
                self.bytes += self.nbytes[tensor]

    def _compute(self, index: int, instruction: Instruction) -> int:
        """Run one op, and return the most bytes on the device meanwhile."""
        op = self.graph.ops[instruction.target]
        again = 0
        if instruction.verb is Verb.RECOMPUTE:
            again = sum(self.nbytes[t] for t in op.recompute_writes if t in self.present)
            self._appear(op.recompute_writes)
        else:
            self._appear(op.writes)
        self._keep_up(index)
        if self.device.runs_behind_host:
            self.host += self.device.op_overhead_seconds
        # Concurrent transfers slow it down.
        end = self.now + self.seconds[op.id] * op.slowdown_of(instruction.algorithm)
        if self.device.transfer_compute_share:
            self.running = [span for span in self.running if span[1] > self.now]
            beside = sum(max(0.0, min(end, until) - max(self.now, since)) for since, until in self.running)
            end += self.device.transfer_compute_share * beside
        self.events.append(Event(index, instruction.verb, op.id, Stream.COMPUTE, self.now, end))
        self.now = end
        return self.bytes + op.workspace_of(instruction.algorithm) + again

    def _keep_up(self, index: int) -> None:
        """Make compute wait until the host has issued its op."""
        if self.host > self.now:
            self.stalls.append(Stall(index, self.now, self.host, HOST))
            self.now = self.host

    def _run_on_host(self, index: int, instruction: Instruction) -> None:
        """Start an op on the host, which runs those started before it first."""
        op = self.graph.ops[instruction.target]
        self._issue(index)
        start = max(self.now, self.host, self.host_free)
        if self.disk is not None:
            start = max([start, *map(self.disk.back, op.reads + op.writes)])
        nbytes = self.graph.moved_on_host_bytes(op)
        self.host_free = start + self.device.host_update_seconds(nbytes, joins=index in self.joined)
        self.updated.update(dict.fromkeys(((Stream.OFFLOAD, t) for t in op.reads + op.writes), self.host_free))
        self.updated.update(dict.fromkeys(((Stream.PREFETCH, t) for t in op.writes), self.host_free))
        if not self.device.runs_behind_host:  # it takes cores that compute would have
            self.running.append((start, self.host_free))
        self.events.append(Event(index, instruction.verb, op.id, Stream.HOST_UPDATE, start, self.host_free))

    def _issue(self, index: int) -> None:
        """Spend the host's time to start a transfer or an update."""
        if self.device.transfer_host_seconds:
            self.host = self.device.transfer_host_seconds + (
                self.host if self.device.runs_behind_host else max(self.host, self.now)
            )
            if not self.device.runs_behind_host:
                self._keep_up(index)

    def _transfer(self, index: int, instruction: Instruction, stream: Stream, duration: float) -> None:
        self._issue(index)
        free = self.link_free[stream] if self.device.full_duplex else max(self.link_free.values())
        start = max(self.now, self.host, free)
        if (updated := self.updated.get((stream, instruction.target), 0.0)) > start:
            self.held[stream, instruction.target] = start = updated
        if self.disk is not None:
            behind = self.device.runs_behind_host  # then the host itself waits, to know the copy's place
            ready = self.disk.ready(instruction, self.host if behind else start)
            self.host = max(self.host, ready) if behind else self.host
            start = max(start, ready)
        self.link_free[stream] = start + duration
        self.arrival[stream, instruction.target] = start + duration
        self.running.append((start, start + duration))
        self.events.append(Event(index, instruction.verb, instruction.target, stream, start, start + duration))

    def _wait(self, index: int, tensor: int, stream: Stream) -> None:
        name = self.graph.tensors[tensor].name
        if (held := self.held.pop((stream, tensor), None)) is not None:
            self._wait_until(index, held, f"{Stream.HOST_UPDATE} of {name}")
        self._wait_until(index, self.arrival[stream, tensor], f"{stream} of {name}")

    def _wait_until(self, index: int, arrival: float, cause: str) -> None:
        if arrival > self.now:
            self.stalls.append(Stall(index, self.now, arrival, cause))
            self.now = arrival
