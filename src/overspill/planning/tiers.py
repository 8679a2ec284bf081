"""Choose which stored copies go on to a disk, and when, so that the others fit in host memory.

A stage of its own behind a policy: the schedule says when each copy is written and read, and the next use of each is
known. Steps follow one another, so time is a ring. A *gap* is the time between two uses of a copy. Where copies take
too much, those go whose next use is furthest (Belady, IBM Systems Journal 5(2), 1966), counting what the disk has to
move for each: a copy that the disk has already costs its read only. Those that a linear program has there go first. A
copy counts as gone only some time after its write begins, so that host memory is free before it is needed. Copies come
back as early as host memory has space for them.

An update on the host ends a copy of what it writes and begins another in the same host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from overspill.core import Device, DiskStay, Graph, Schedule, Tiers, Timeline, Verb

from .linear_program import LinearProgram

PAGE_BYTES = 4096
"""A copy takes whole pages of host memory and of the disk."""
MOST_TERMS = 200_000
"""The most terms of the linear program that gives a bound on what is moved."""
EARLINESS = (0.0, 4.0)
"""Read-ahead begins as early as a disk needs that is so many times slower; 0: as early as memory allows."""
WRITTEN_BEHIND = (16, 4, 1)
"""A copy counts as gone after so many times as long as its write takes, for others are written before it."""
MORE = 1.1
"""If that moves more than so many times what is moved otherwise, the next is tried; behind the last, gone at once."""
CLOSE = 1.03
"""No other is tried if a step takes at most so many times as long as the disk's work, or as without a disk."""


_CHOSEN: ContextVar[dict[int, tuple[Schedule, Tiers, Timeline]] | None] = ContextVar("chosen_tiers", default=None)
"""By the identity of their instructions, the schedules whose tiers are chosen."""


@contextmanager
def each_chosen_once() -> Iterator[None]:
    """Choose the tiers of each schedule once inside the block, which is about one graph on one device."""
    token = _CHOSEN.set({})
    try:
        yield
    finally:
        _CHOSEN.reset(token)


@dataclass(frozen=True)
class _Gap:
    """The time in which a copy is not used: instructions `begin` to before `end`, which may be past the step's end."""

    copy: int
    begin: int
    end: int
    nbytes: int


@dataclass
class _Copy:
    """One copy of a tensor in the store: when it is made, and the Prefetches that read it with their Awaits."""

    tensor: int
    nbytes: int
    made: tuple[int, int] | None
    """The Offload and its Await; None for a copy that no step writes."""
    reads: list[tuple[int, int]] = field(default_factory=list)
    lasts: bool = False
    """Whether the next step reads it."""
    ends_in_update: bool = False
    """Whether it ends where the host writes the next copy to its memory."""


def with_tiers(
    graph: Graph, schedule: Schedule, device: Device, simulate: Callable[[Tiers | None], Timeline]
) -> tuple[Tiers | None, Timeline]:
    """Return the fastest tiers found for `schedule` on `device`, and the timeline with them.

    They are None where the device's store has no disk below. `simulate` returns the timeline with given tiers.
    """
    timeline = simulate(None)
    return StoredCopies(graph, schedule, device).fastest(timeline, simulate) if device.host_bytes else (None, timeline)


class StoredCopies:
    """The copies of a schedule in host memory, over the instructions of one step of many."""

    def __init__(self, graph: Graph, schedule: Schedule, device: Device) -> None:
        self.schedule, self.count = schedule, len(schedule.instructions)
        self.device, self.budget = device, device.host_bytes
        self.copies = _copies(graph, schedule)
        self.gaps = [gap for number, copy in enumerate(self.copies) for gap in self._gaps_of(number, copy)]
        self._bounds = np.array([(gap.begin, gap.end) for gap in self.gaps], dtype=np.int64).reshape(-1, 2).T
        self.held = np.zeros(self.count, dtype=np.int64)
        for copy in self.copies:
            for begin, end in self._life(copy):
                self.held[begin:end] += copy.nbytes

    def _life(self, copy: _Copy) -> list[tuple[int, int]]:
        """Return the spans of instructions in which a copy exists."""
        if copy.made is None:
            return [(0, self.count)]
        made = copy.made[0]
        if not copy.lasts:
            return [(made, max(made, self._end_of(copy) + 1))]
        return [(made, self.count), (0, self._end_of(copy) + 1)]

    def _end_of(self, copy: _Copy) -> int:
        """Return the instruction at which a copy is needed no more."""
        assert copy.made is not None
        before = [end for start, end in copy.reads if not copy.lasts or start <= copy.made[0]]
        if copy.lasts and not before:
            return copy.made[0] - 1
        return max(before, default=copy.made[1])

    def _gaps_of(self, number: int, copy: _Copy) -> Iterable[_Gap]:
        """Yield the gaps between the uses of a copy."""
        if copy.made is None:
            uses = [*copy.reads, (copy.reads[0][0] + self.count, 0)] if copy.reads else []
        else:
            later = [(start + self.count * (start < copy.made[0] + copy.lasts), end) for start, end in copy.reads]
            uses = [copy.made, *sorted((s, e + self.count * (s >= self.count)) for s, e in later)]
        for (_, end), (start, _) in pairwise(uses):
            if end + 1 < start:
                yield _Gap(number, end + 1, start, copy.nbytes)

    def _spans(self, begin: int, end: int) -> list[slice]:
        """Return the span from `begin` to before `end`, which may be past the step's end, as slices of one step."""
        if begin >= self.count:
            begin, end = begin - self.count, end - self.count
        if end <= self.count:
            return [slice(begin, end)]
        return [slice(begin, self.count), slice(0, end - self.count)]

    def _add(self, held: np.ndarray, begin: int, end: int, nbytes: int) -> None:
        for span in self._spans(begin, end):
            held[span] += nbytes

    def _most(self, held: np.ndarray, begin: int, end: int) -> int:
        return max(int(held[span].max(initial=0)) for span in self._spans(begin, end))

    @property
    def in_use_bytes(self) -> int:
        """The most that copies in use at once take."""
        used = self.held.copy()
        for gap in self.gaps:
            self._add(used, gap.begin, gap.end, -gap.nbytes)
        return int(used.max(initial=0))

    def unplanned(self) -> Tiers:
        """Return the tiers of copies that host memory is too small for: what goes to the disk follows from the run."""
        whole = sum(copy.nbytes for copy in self.copies)
        return Tiers(self.budget, self.in_use_bytes, start_bytes=0, disk_bytes=whole, least_moved_bytes=0)

    @property
    def least_seconds(self) -> float:
        """A bound: what the disk is busy with in each step for the moment at which copies take the most."""
        now = int(self.held.argmax()) if self.count else 0
        excess = max(0, int(self.held.max(initial=0)) - self.budget)
        # Copies that no step writes go first, for they are only read.
        active = (self.gaps[number] for number in self._active(now, self._bounds[0]))
        clean = min(excess, sum(gap.nbytes for gap in active if self.copies[gap.copy].made is None))
        return self.device.disk_seconds(excess, excess - clean)

    def fastest(self, alone: Timeline, simulate: Callable[[Tiers], Timeline]) -> tuple[Tiers, Timeline]:
        """Return the fastest tiers found, and the timeline with them; `alone` is that without a disk."""
        if not (unplanned := self.unplanned()).fits:
            worst = self.device.disk_seconds(unplanned.disk_bytes, unplanned.disk_bytes)  # as if each were waited for
            return unplanned, replace(alone, step_seconds=alone.step_seconds + worst)
        known = _CHOSEN.get()
        if known is not None and id(self.schedule.instructions) in known:
            return known[id(self.schedule.instructions)][1:]
        found: dict[Tiers, Timeline] = {}
        timeline = alone
        for earliness in EARLINESS:
            tiers = self.tiers(timeline, earliness)
            if tiers not in found:
                found[tiers] = timeline = simulate(tiers)
            if timeline.step_seconds <= CLOSE * max(alone.step_seconds, timeline.disk_seconds):
                break
        best = min(found.items(), key=lambda one: one[1].step_seconds)
        if known is not None:
            known[id(self.schedule.instructions)] = (self.schedule, *best)
        return best

    def tiers(self, timeline: Timeline, earliness: float) -> Tiers:
        """Return the stays on the disk, by the times at which instructions end and updates on the host begin."""
        clock = np.asarray(timeline.clock_seconds)
        least, shares = self._relaxed
        chosen = self._chosen_in_time(clock, shares)
        held, taken = self.held.copy(), self.held.copy()
        for gap, gone in chosen.items():
            self._add(held, gone, gap.end, -gap.nbytes)
        begun = self._read_ahead(chosen, timeline, earliness, held)
        on_disk: set[int] = set()
        stays = []
        for gap in sorted(chosen, key=lambda gap: (gap.copy, gap.begin)):
            self._add(taken, gap.begin, begun[gap], -gap.nbytes)
            copy = self.copies[gap.copy]
            written = copy.made is not None and gap.copy not in on_disk
            on_disk.add(gap.copy)
            stays.append(
                DiskStay(copy.tensor, gap.begin % self.count, begun[gap] % self.count, gap.end % self.count, written)
            )
        ends = [(self._end_of(copy), copy.tensor) for copy in self.copies if copy.made and not copy.ends_in_update]
        start = sum(c.nbytes for c in self.copies if c.made is None or c.lasts)
        start -= sum(g.nbytes for g in chosen if g.begin < self.count <= begun[g])
        return Tiers(
            host_budget_bytes=self.budget,
            host_peak_bytes=int(taken.max(initial=0)),
            start_bytes=start,
            disk_bytes=sum(self.copies[number].nbytes for number in on_disk),
            least_moved_bytes=least,
            stays=tuple(sorted(stays, key=lambda stay: (stay.write, stay.tensor))),
            ends=tuple(sorted(ends)),
        )

    def _chosen_in_time(self, clock: np.ndarray, shares: Mapping[_Gap, float]) -> dict[_Gap, int]:
        """Return the gaps in which copies are on the disk, each with the instruction before which it counts as gone."""
        at_once = self._chosen(clock, shares, self._bounds[0])
        for times in WRITTEN_BEHIND:
            found = self._chosen(clock, shares, self._gone(clock, times))
            if self._moved(found) <= MORE * self._moved(at_once):
                return found
        return at_once

    def _moved(self, chosen: Iterable[_Gap]) -> int:
        """Return the bytes that the disk reads and writes with these gaps."""
        written = {gap.copy for gap in chosen if self.copies[gap.copy].made is not None}
        return sum(gap.nbytes for gap in chosen) + sum(self.copies[number].nbytes for number in written)

    def _chosen(self, clock: np.ndarray, shares: Mapping[_Gap, float], behind: np.ndarray) -> dict[_Gap, int]:
        """Return the gaps chosen if copies are gone before the instructions `behind`, each with its own.

        Those with the largest `shares` go first. Where host memory needs more, copies count as gone at once.
        """
        chosen: dict[int, int] = {}
        on_disk = np.array([copy.made is None for copy in self.copies])
        copies = np.array([gap.copy for gap in self.gaps], dtype=np.int64)
        dearest = -np.array([round(shares.get(gap, 0.0), 2) for gap in self.gaps])
        left = np.ones(len(self.gaps), dtype=bool)
        begins, ends = self._bounds
        whole = float(clock[-1]) if len(clock) else 0.0
        dirty = 1 + self.device.disk_read_bytes_per_second / self.device.disk_write_bytes_per_second
        used = clock[ends % self.count] + whole * (ends // self.count)
        for gone in (behind, begins):
            held, before = self.held.copy(), set(chosen)
            for number in chosen:
                self._add(held, int(gone[number]), int(ends[number]), -self.gaps[number].nbytes)
            for now in np.flatnonzero(held > self.budget):
                if held[now] <= self.budget:
                    continue
                active = self._active(int(now), gone)
                active = active[left[active]]
                worth = used[active] - whole * (gone[active] > now) - clock[now]  # of those that began a step earlier
                worth /= np.where(on_disk[copies[active]], 1.0, dirty)
                for number in active[np.lexsort((-worth, dearest[active]))].tolist():
                    gap = self.gaps[number]
                    chosen[number], left[number], on_disk[gap.copy] = int(gone[number]), False, True
                    self._add(held, chosen[number], gap.end, -gap.nbytes)
                    if held[now] <= self.budget:
                        break
            # Some are there for the start of what others cover as well: the dearest go first.
            for number in sorted(chosen.keys() - before, key=lambda number: (-self.gaps[number].nbytes, number)):
                gap = self.gaps[number]
                if self._most(held, chosen[number], gap.end) + gap.nbytes <= self.budget:
                    self._add(held, chosen.pop(number), gap.end, gap.nbytes)
                    left[number] = True
        return {self.gaps[number]: begin for number, begin in chosen.items()}

    def _gone(self, clock: np.ndarray, times: int) -> np.ndarray:
        """Return for each gap the instruction before which its copy has had `times` as long as its write takes."""
        begins, ends = self._bounds
        whole = float(clock[-1]) if len(clock) else 0.0
        seconds = np.array([
            0.0 if self.copies[gap.copy].made is None else self.device.disk_write_seconds(gap.nbytes)
            for gap in self.gaps
        ])  # fmt: skip
        ended = np.concatenate([clock, clock + whole, clock + 2 * whole])
        written = np.searchsorted(ended, ended[begins - 1] + times * seconds) + 1
        return np.where(seconds > 0, np.clip(written, begins, ends), begins)

    def _active(self, now: int, begins: np.ndarray) -> np.ndarray:
        """Return the numbers of the gaps, from `begins` on, that instruction `now` is in."""
        ends = self._bounds[1]
        inside = ((begins <= now) & (now < ends)) | ((begins <= now + self.count) & (now + self.count < ends))
        return np.flatnonzero(inside)

    def _read_ahead(
        self, chosen: Mapping[_Gap, int], timeline: Timeline, earliness: float, held: np.ndarray
    ) -> dict[_Gap, int]:
        """Return where each copy begins to come back; `held` becomes what is in host memory then.

        From the last to the first, each is read before the one behind it, and before it is needed. Then those needed
        first take host memory first.
        """
        clock = np.asarray(timeline.clock_seconds)
        updates = {e.instruction: e.start_seconds for e in timeline.events if e.verb is Verb.RUN_ON_HOST}
        whole = float(clock[-1]) if len(clock) else 0.0
        ended = np.concatenate([clock - whole, clock])  # of the step before, and of this one

        def need(gap: _Gap) -> float:
            before = float(ended[self.count + gap.end % self.count - 1])
            return updates.get(gap.end % self.count, before)

        by_need = sorted(chosen, key=lambda gap: (need(gap), gap.end % self.count, gap.copy))
        latest: dict[_Gap, int] = {}
        free = 2 * whole
        for shift in (whole, 0.0):  # what the next step needs first is read in this one
            for gap in reversed(by_need):
                free = min(need(gap) + shift, free) - earliness * self.device.disk_read_seconds(gap.nbytes)
                latest[gap] = int(np.searchsorted(ended, free - shift, side="right")) - self.count
        begun: dict[_Gap, int] = {}
        for gap in by_need:
            wanted = latest[gap] if earliness else -self.count
            wanted += gap.end - gap.end % self.count
            begun[gap] = self._earliest(gap, min(max(chosen[gap], wanted), gap.end), held)
            self._add(held, begun[gap], gap.end, gap.nbytes)
        return begun

    def _earliest(self, gap: _Gap, wanted: int, held: np.ndarray) -> int:
        """Return the first instruction from `wanted` on from which host memory has space for the copy until its use."""
        position = gap.end
        for span in reversed(self._spans(wanted, gap.end)):
            full = np.flatnonzero(held[span] + gap.nbytes > self.budget)
            if len(full):
                return position - (span.stop - span.start) + int(full[-1]) + 1
            position -= span.stop - span.start
        return wanted

    @cached_property
    def _relaxed(self) -> tuple[int, dict[_Gap, float]]:
        """Return the fewest bytes that any choice reads and writes, and the share of each gap that does so.

        A linear program, in which parts of a copy may be on the disk: gaps that cover each moment at which copies take
        too much, and one write for the gaps of a copy. Of a long step only the worst moments are in it.
        """
        worst: dict[bytes, tuple[np.ndarray, int]] = {}
        over = np.flatnonzero(self.held > self.budget)
        most = max(1, MOST_TERMS // max(1, len(self.gaps)))
        for now in over[np.argsort(-self.held[over], kind="stable")][:most]:
            active = self._active(int(now), self._bounds[0])
            worst.setdefault(active.tobytes(), (active, int(self.held[now]) - self.budget))
        program = LinearProgram()
        write = [program.variable(1.0, copy.nbytes * (copy.made is not None)) for copy in self.copies]
        read = [program.variable(1.0, gap.nbytes) for gap in self.gaps]
        for active, excess in worst.values():
            program.row([(read[number], self.gaps[number].nbytes) for number in active], lower=excess)
        for gap, column in zip(self.gaps, read, strict=True):
            program.row([(write[gap.copy], 1.0), (column, -1.0)], lower=0.0)
        solved = program.solve()
        if solved is None:
            return 0, {}
        return math.floor(solved[0] * (1 - 1e-9)), {
            gap: solved[1][column] for gap, column in zip(self.gaps, read, strict=True)
        }


def page_bytes(nbytes: int) -> int:
    """Return the bytes that a copy of `nbytes` takes, in whole pages."""
    return -(-max(1, nbytes) // PAGE_BYTES) * PAGE_BYTES


def _copies(graph: Graph, schedule: Schedule) -> list[_Copy]:
    """Return the copies in the store of one step; one that the next step reads is there at the start, too."""
    events: dict[int, list[tuple[int, Verb]]] = {}
    on_host = {*schedule.targets(Verb.RUN_ON_HOST)}
    on_device = {t for op in graph.ops if op.id not in on_host for t in op.writes}
    for index, instruction in enumerate(schedule.instructions):
        if instruction.verb is Verb.RUN_ON_HOST:
            op = graph.ops[instruction.target]
            for tensor in op.reads:
                events.setdefault(tensor, []).append((index, Verb.RUN_ON_HOST))
            for tensor in op.writes:
                events.setdefault(tensor, []).append((index, Verb.RUN))
        elif instruction.verb in (Verb.OFFLOAD, Verb.AWAIT_OFFLOAD, Verb.PREFETCH, Verb.AWAIT_PREFETCH):
            events.setdefault(instruction.target, []).append((index, instruction.verb))
    made = []
    for tensor in sorted({*events, *schedule.stored}):
        nbytes = page_bytes(graph.tensors[tensor].nbytes)
        before, *copies = _copies_of(tensor, nbytes, events.get(tensor, ()))
        if not copies:  # no step writes it
            made.append(before)
            continue
        # The last is the one that the next step reads.
        if tensor in schedule.stored or (graph.tensors[tensor].persistent and tensor not in on_device):
            copies[-1].lasts = True
            copies[-1].reads += before.reads
            copies[-1].ends_in_update = before.ends_in_update
        made += copies
    return made


def _copies_of(tensor: int, nbytes: int, events: Iterable[tuple[int, Verb]]) -> list[_Copy]:
    """Return the copies of a tensor, from the one before the step on.

    Of updates on the host, RUN_ON_HOST stands for a read, and RUN for a write, which reads too.
    """
    found = [_Copy(tensor, nbytes, None)]
    since = 0
    for index, verb in events:
        last = found[-1]
        if verb is Verb.OFFLOAD:
            found.append(_Copy(tensor, nbytes, (index, index)))
        elif verb is Verb.AWAIT_OFFLOAD:
            last.made = last.made and (last.made[0], index)
        elif verb is Verb.PREFETCH:
            since = index
        elif verb is Verb.AWAIT_PREFETCH:
            last.reads.append((since, index))
        elif verb is Verb.RUN_ON_HOST:
            last.reads.append((index, index))
        else:
            if last.reads and last.reads[-1][0] == index:
                last.reads.pop()
            last.reads.append((index, index - 1))
            last.ends_in_update = True
            found.append(_Copy(tensor, nbytes, (index, index)))
    return found
