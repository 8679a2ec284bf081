"""Ways to try the live allocator: a witness of every byte, and random steps."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from overspill.core import Block, Trace
from overspill.placement import FREE, Events
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


@contextmanager
def grouped(group: int) -> Iterator[None]:
    """While this lasts, blocks that this thread asks for are of the group."""
    tell_group(group)
    try:
        yield
    finally:
        forget_groups()
