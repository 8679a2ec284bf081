"""The native allocators: the same rules in C++, many times as fast. See native/allocators/."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import Any

from overspill.placement.simulated_device import ADDRESS_SPACE_BYTES

from . import _native
from ._native import SimulatedAllocator
from .base import SEGMENT_ACTIONS, Allocator, BlockView, Gauge, SegmentEvent, SegmentView, config_or_default

_STATES = {1: "live", 0: "free", -1: "unmapped"}


def has(name: str) -> bool:
    """Whether the allocator `name` exists in C++."""
    return name in _native.names()


def simulated_allocator(
    name: str, config_type: type[Any], config: Any, capacity_bytes: int | None
) -> SimulatedAllocator:
    """The native allocator `name` over an empty simulated device."""
    settings = asdict(config_or_default(name, config_type, config))
    return _native.SimulatedAllocator(name, settings, capacity_bytes)


class NativeAllocator(Allocator):
    """A native allocator, call by call; `replay` does many events at once."""

    def __init__(
        self, name: str, config_type: type[Any], config: Any = None, *, capacity_bytes: int | None = None
    ) -> None:
        self.name = name
        self.capacity_bytes = capacity_bytes
        self._core = simulated_allocator(name, config_type, config, capacity_bytes)

    @property
    def clock(self) -> int:
        return self._core.clock

    @clock.setter
    def clock(self, value: int) -> None:
        self._core.clock = value

    @property
    def requested(self) -> Gauge:
        return Gauge(*self._core.gauges()[0])

    @property
    def allocated(self) -> Gauge:
        return Gauge(*self._core.gauges()[1])

    @property
    def reserved(self) -> Gauge:
        return Gauge(*self._core.gauges()[2])

    @property
    def retries(self) -> int:
        return self._core.retries

    @property
    def segment_log(self) -> list[SegmentEvent]:
        rows = self._core.segment_table().tolist()
        return [SegmentEvent(at, SEGMENT_ACTIONS[action], *rest) for at, action, *rest in rows]

    @property
    def device_used_bytes(self) -> int:
        return self._core.used_bytes

    @property
    def spread_bytes(self) -> int:
        return self._core.spread_bytes

    def usable_bytes(self, request_bytes: int) -> int:
        return self._core.usable_bytes(request_bytes)

    def live_addresses(self) -> list[int]:
        return self._core.live_addresses()

    def segments(self) -> tuple[SegmentView, ...]:
        found: list[SegmentView] = []
        for _, rows in groupby(self._core.block_rows(), key=lambda row: row[0]):
            blocks = list(rows)
            views = tuple(BlockView(address, n, asked, _STATES[state]) for _, address, n, asked, state, _ in blocks)
            mapped = sum(view.nbytes for view in views if view.state != "unmapped")
            found.append(SegmentView(views[0].address, sum(view.nbytes for view in views), mapped, blocks[0][5], views))
        return tuple(found)

    def _place(self, nbytes: int, stream: int, mobility: int) -> int | None:
        return self._core.allocate(nbytes, stream, mobility) if nbytes <= ADDRESS_SPACE_BYTES else None

    def _take_back(self, address: int) -> bool:
        return self._core.free(address)

    def _idle_count(self) -> int:
        return self._core.idle_count
