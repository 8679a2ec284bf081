"""Ways to try the live allocator: a witness of every byte, a layout by first fit, and what replay must answer."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from overspill.core import Block, Layout, Trace
from overspill.placement import ALLOCATE, FREE, Events
from overspill.placement.packing.base import Limits, Packing, Solver
from overspill.placement.packing.problem import Problem
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.groups import forget_groups, tell_group

KIB = 1 << 10
POOLS = {
    "best-fit": {"pool": "best-fit"},
    "two-ended": {"pool": "two-ended", "main_bytes": 256 * KIB},
    "virtual": {"pool": "virtual", "chunk_bytes": 16 * KIB},
}


def memory_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """The bytes there, to read and write."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=np.uint8)


def pattern(tag: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that no other tag has."""
    return np.frombuffer(tag.to_bytes(8, "little") * (nbytes // 8 + 1), dtype=np.uint8)[:nbytes]


@dataclass
class Held:
    """A block of `stream`, and the streams that may work on it: also when it is freed, until they have done so."""

    address: int
    nbytes: int
    tag: int
    stream: int
    used_on: set[int]


@dataclass
class Witness:
    """An allocator on host memory, all of whose blocks hold a pattern of their own.

    A freed block keeps its pattern until the other streams that used it have done their work. Its own stream may write
    to its place at once, others only when that stream has done its work. Without `events_by_hand` nobody knows when
    that is, and only live blocks are watched.
    """

    allocator: LiveAllocator
    events_by_hand: bool = False
    live: dict[int, Held] = field(default_factory=dict)
    freed: list[Held] = field(default_factory=list)
    tags: int = 0

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        address = self.allocator.allocate(nbytes, stream)
        if not nbytes:
            return address
        assert address % 512 == 0
        assert address not in self.live
        for held in self.freed:
            apart = held.address + held.nbytes <= address or address + nbytes <= held.address
            assert apart or held.used_on == {stream}, "the place is still in use by another stream"
        self.tags += 1
        self.live[address] = Held(address, nbytes, self.tags, stream, {stream})
        memory_at(address, nbytes)[:] = pattern(self.tags, nbytes)
        return address

    def use(self, address: int, stream: int) -> None:
        self.allocator.use(address, stream)
        self.live[address].used_on.add(stream)

    def free(self, address: int) -> None:
        if address:
            held = self.live.pop(address)
            self.check(held)
            if self.events_by_hand:
                self.freed.append(held)
        self.allocator.free(address)

    def complete(self, stream: int) -> None:
        """The stream has done all its work."""
        for held in self.freed:
            held.used_on.discard(stream)
        self.freed = [held for held in self.freed if held.used_on]
        self.allocator.complete(stream)

    def check(self, held: Held) -> None:
        found = memory_at(held.address, held.nbytes)
        assert np.array_equal(found, pattern(held.tag, held.nbytes)), f"block {held} was overwritten"

    def check_all(self) -> None:
        for held in self.live.values():
            self.check(held)
        for held in self.freed:
            if held.used_on != {held.stream}:
                self.check(held)

    def run(self, events: Events, seed: int = 0, checked: float = 0.1) -> None:
        """One step; all is checked at that share of its events."""
        r = random.Random(seed)
        self.allocator.begin_step()
        addresses: dict[int, int] = {}
        rows = (events.action.tolist(), events.block.tolist(), events.nbytes.tolist(), events.stream.tolist())
        for action, block, nbytes, stream in zip(*rows, strict=True):
            if action == FREE:
                self.free(addresses.pop(block))
            else:
                addresses[block] = self.allocate(nbytes, stream)
            if r.random() < checked:
                self.check_all()
        for address in addresses.values():
            self.free(address)


class FirstFit(Solver):
    """Every block at the lowest address where it is apart from those before it in the trace."""

    name = "first-fit"
    summary = "the lowest address where a block fits, in the order of the trace"
    source = "a test"

    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        placed: list[tuple[int, int, list[tuple[int, int]]]] = []
        for i in range(len(problem)):
            pieces = self._pieces(problem, i)
            taken = [(low, high) for low, high, others in placed if _meet(pieces, others)]
            nbytes, step, at = int(problem.nbytes[i]), int(problem.alignment[i]), 0
            for low, high in sorted(taken):
                if at + nbytes <= low:
                    break
                at = max(at, -(-high // step) * step)
            placed.append((at, at + nbytes, pieces))
        return Packing(np.array([low for low, _, _ in placed], dtype=np.int64), problem.lower_bound_bytes)

    @staticmethod
    def _pieces(problem: Problem, i: int) -> list[tuple[int, int]]:
        gaps = slice(int(problem.gap_first[i]), int(problem.gap_first[i + 1]))
        starts = [int(problem.start[i]), *problem.gap_end[gaps].tolist()]
        return list(zip(starts, [*problem.gap_start[gaps].tolist(), int(problem.end[i])], strict=True))


def _meet(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


def first_fit(trace: Trace) -> Layout:
    """A layout that leaves gaps enough."""
    layout = FirstFit().solve(trace).layout
    assert layout is not None
    return layout


def random_trace(r: random.Random, count: int = 60, streams: int = 1) -> Trace:
    """A step of `count` blocks of up to 40 KiB, each allocation and free at a position of its own."""
    open_: list[tuple[int, int, int]] = []
    rows: list[tuple[int, int, int, int]] = []
    position = 0
    while len(rows) < count:
        position += 1
        if open_ and (len(rows) + len(open_) >= count or r.random() < 0.5):
            start, nbytes, stream = open_.pop(r.randrange(len(open_)))
            rows.append((start, position, nbytes, stream))
        else:
            open_.append((position, 512 * r.choice([1, 2, 3, r.randrange(1, 80)]), r.randrange(streams)))
    return Trace(tuple(Block(i, s, e, n, stream=q, alignment=512) for i, (s, e, n, q) in enumerate(sorted(rows))))


class Replayed:
    """What replay must answer, by definition: a request gets its place if it is the planned one and nobody is there.

    It is the next one, if that is as large; else the first of the 31 behind it that is; else the next one, if it has room.
    """

    def __init__(self, trace: Trace, layout: Layout) -> None:
        order = np.argsort([b.start for b in trace.blocks], kind="stable")
        self.plan = [(layout.offsets[i], trace.blocks[i].nbytes, trace.blocks[i].stream) for i in order]
        self.live: dict[int, int] = {}
        self.next = 0

    def begin_step(self) -> None:
        self.next = 0

    def request(self, nbytes: int, stream: int) -> int | None:
        """The offset that it gets, or None: the pool's."""
        if self.next == len(self.plan):
            return None
        exact = (-(-nbytes // 512) * 512, stream)
        ahead = range(self.next, min(self.next + 32, len(self.plan)))
        found = next((i for i in ahead if self.plan[i][1:] == exact), self.next)
        offset, size, planned_stream = self.plan[found]
        if nbytes > size or stream != planned_stream:
            return None
        self.next = found + 1
        meets = any(low < offset + size and offset < low + n for low, n in self.live.items())
        if meets:
            return None
        self.live[offset] = size
        return offset

    def free(self, offset: int) -> None:
        del self.live[offset]


@contextmanager
def grouped(group: int) -> Iterator[None]:
    """While this lasts, blocks that this thread asks for are of the group."""
    tell_group(group)
    try:
        yield
    finally:
        forget_groups()


__all__ = [
    "ALLOCATE",
    "FREE",
    "KIB",
    "POOLS",
    "FirstFit",
    "Replayed",
    "Witness",
    "first_fit",
    "grouped",
    "memory_at",
    "random_trace",
]
