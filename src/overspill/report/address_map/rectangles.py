"""The rectangles, lines and colour scale of an address map, whatever draws it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from overspill.core import Block, Layout, Trace
from overspill.core.units import format_bytes

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
TIME_AXIS, SIZE_AXIS = "position", "size of the block"
BOUND_COLOUR, CAPACITY_COLOUR, LIVE_COLOUR = "#000000", "#D55E00", "#0072B2"
MAP_HEIGHT, LIVE_HEIGHT = 4.2, 1.3
UNSEEN_SHARE = 0.005
"""Blocks that take no more of the picture than this in all have no colours of their own."""


@dataclass(frozen=True, eq=False)
class AddressMap:
    """The rectangles of the blocks of one address space.

    There is one a block, or one for each time between its gaps. Rectangle i is of the block at position `block[i]` of
    the trace, live in `[start[i], end[i])` at `offset[i]`. The live bytes are `live[i]`, in units of `unit_bytes`, from
    `times[i]` on.
    """

    space: int
    unit: str
    unit_bytes: int
    block: Integers
    nbytes: Integers
    offset: Integers
    start: Floats
    end: Floats
    times: Floats
    live: Floats

    @classmethod
    def of(cls, trace: Trace, layout: Layout, space: int, unit: str, unit_bytes: int) -> AddressMap:
        """The map of `space`."""
        blocks = trace.blocks
        pieces = [(i, *piece) for i, block in enumerate(blocks) if block.space == space for piece in block.pieces]
        table = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        block, start, end = table[:, 0], table[:, 1].astype(np.float64), table[:, 2].astype(np.float64)
        nbytes = np.array([blocks[i].nbytes for i in block.tolist()], dtype=np.int64)
        offset = np.array([layout.offsets[i] for i in block.tolist()], dtype=np.int64)
        times, at = np.unique(np.concatenate([start, end]), return_inverse=True)
        change = np.zeros(len(times), dtype=np.int64)
        np.add.at(change, at, np.concatenate([nbytes, -nbytes]))
        live = np.cumsum(change) / unit_bytes
        return cls(space, unit, unit_bytes, block, nbytes, offset, start, end, times, live)

    def __len__(self) -> int:
        return len(self.block)

    @cached_property
    def low(self) -> Floats:
        """The address of each rectangle, in the unit."""
        return self.offset / self.unit_bytes

    @cached_property
    def high(self) -> Floats:
        """The end address of each rectangle, in the unit."""
        return (self.offset + self.nbytes) / self.unit_bytes

    @property
    def time_range(self) -> tuple[float, float]:
        """The first and last position shown."""
        return (float(self.times[0]), float(self.times[-1])) if len(self) else (0.0, 1.0)

    @property
    def bound(self) -> float:
        """The most live bytes, in the unit."""
        return float(self.live.max(initial=0.0))

    def top(self, capacity_bytes: int | None) -> float:
        """The highest address shown, in the unit.

        All of the layout is shown, and the capacity where it is not far above.
        """
        peak = float(self.high.max(initial=0.0)) or 1.0
        capacity = 0.0 if capacity_bytes is None else capacity_bytes / self.unit_bytes
        return 1.04 * (capacity if peak < capacity <= 2 * peak else peak)


def address_maps(trace: Trace, layout: Layout) -> list[AddressMap]:
    """A map for each space of `trace`, all in the same unit."""
    ends = (offset + block.nbytes for offset, block in zip(layout.offsets, trace.blocks, strict=True) if block.pieces)
    peak = max(ends, default=0)
    unit, unit_bytes = next((unit, nbytes) for unit, nbytes in UNITS.items() if peak >= nbytes or nbytes == 1)
    return [AddressMap.of(trace, layout, space, unit, unit_bytes) for space in trace.spaces or (0,)]


def name_of(block: Block) -> str:
    """The name of a block, or its number."""
    return block.name or str(block.id)


def lines(shown: AddressMap, capacity_bytes: int | None) -> Iterator[tuple[float, str, str, str]]:
    """The horizontal lines: address, label, colour and style.

    Both can be seen where they meet.
    """
    if capacity_bytes is not None:
        yield capacity_bytes / shown.unit_bytes, f"capacity, {format_bytes(capacity_bytes)}", CAPACITY_COLOUR, "solid"
    yield shown.bound, f"most live bytes, {format_bytes(shown.bound * shown.unit_bytes)}", BOUND_COLOUR, "dash"


def size_range(maps: Sequence[AddressMap]) -> tuple[float, float]:
    """The smallest and largest block size of the colour scale.

    Below the smallest, blocks hardly take any room.
    """
    sizes = np.concatenate([shown.nbytes for shown in maps])
    if not sizes.size:
        return 1.0, 2.0
    order = np.argsort(sizes)
    area = np.cumsum((sizes * np.concatenate([shown.end - shown.start for shown in maps]))[order])
    least = sizes[order][np.searchsorted(area, UNSEEN_SHARE * area[-1])]
    return float(least), float(max(sizes.max(), 2 * least))


def powers_of_2(least: float, most: float) -> list[float]:
    """At most nine powers of 2 between two sizes, evenly spaced."""
    first, last = math.ceil(math.log2(least)), math.floor(math.log2(most))
    return [2.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / 8)))]


def address_axis(shown: AddressMap, maps: Sequence[AddressMap]) -> str:
    """The label of the address axis."""
    return f"address ({shown.unit})" + (f", space {shown.space}" if len(maps) > 1 else "")
