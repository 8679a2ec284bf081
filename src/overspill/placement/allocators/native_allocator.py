"""The base of allocators whose rules are native (native/allocators/)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, ClassVar

from overspill.core import Mobility
from overspill.placement.events import EMPTY, FREE
from overspill.placement.simulated_device import SimulatedDevice

from . import _native
from .base import NOWHERE, SEGMENT_ACTIONS, Allocator, BlockView, Gauge, SegmentEvent, SegmentView

BLOCK_STATES = ("live", "free", "unmapped")
"""The states of a block by their number in the native core."""


class NativeAllocator(Allocator):
    """An allocator that the native core carries out, call by call here and whole traces in `replay`."""

    core: ClassVar[str]
    """Its name in the native core."""

    def __init__(
        self, config: Any = None, *, capacity_bytes: int | None = None, device: SimulatedDevice | None = None
    ) -> None:
        """Start with an empty cache; `device` answers for the native one (None: a simulated device)."""
        super().__init__(config, capacity_bytes=capacity_bytes)
        if device is not None:
            self.device = device  # which the core refers to
        self._core = _native.Stepper(self.core, asdict(self.config), capacity_bytes, device)

    def empty_cache(self) -> None:
        """Give all memory without live blocks back to the device."""
        self._core.empty_cache(self.clock)
        self._follow()

    def mark_step(self) -> None:
        """End a step of the job here. Without marks, allocators that learn find steps by their repetition."""
        self._core.mark_step()

    def serve_steps(self, steps: Iterable[Iterable[tuple[int, int, int]]]) -> list[int] | None:
        """Return how often memory was given back to make room, up to the end of each step; None if it ran out.

        A step is its events, each an action, a block and its bytes. Statistics are brought up to date only in the end,
        which takes a third of the time.
        """
        core, found = self._core, []
        live: dict[int, int] = {}
        for step in steps:
            for action, block, nbytes in step:
                if action == FREE:
                    if (address := live.pop(block)) != NOWHERE:
                        core.free(self.clock, address)
                elif action == EMPTY:
                    core.empty_cache(self.clock)
                else:
                    served = core.allocate(self.clock, nbytes, 0, Mobility.MOVABLE) if nbytes else NOWHERE
                    if served is None:
                        self._follow()
                        return None
                    live[block] = served
                self.clock += action != EMPTY
            core.mark_step()
            found.append(core.retries())
        self._follow()
        return found

    def _allocate(self, nbytes: int, stream: int, mobility: int) -> int | None:
        address = self._core.allocate(self.clock, nbytes, stream, mobility)
        self._follow()
        return address

    def _free(self, address: int) -> bool:
        done = self._core.free(self.clock, address)
        self._follow()
        return done

    def _follow(self) -> None:
        """Bring the statistics and the log up to date."""
        self.requested, self.allocated, self.reserved = (Gauge(*gauge) for gauge in self._core.gauges())
        self.retries = self._core.retries()
        for at, action, *rest in self._core.exchanges(len(self.segment_log)):
            self.segment_log.append(SegmentEvent(at, SEGMENT_ACTIONS[action], *rest))

    @property
    def spread_bytes(self) -> int:
        """Bytes of all segments up to their last live blocks."""
        return self._core.spread_bytes()

    def usable_bytes(self, request_bytes: int) -> int:
        """Return the bytes of free blocks of at least `request_bytes`."""
        return self._core.usable_bytes(request_bytes)

    def live_addresses(self) -> list[int]:
        """Return the addresses allocated and not freed."""
        return self._core.live_addresses()

    def segments(self) -> tuple[SegmentView, ...]:
        """Return all segments with their blocks, by address."""
        found = []
        for stream, blocks in self._core.segments():
            views = tuple(
                BlockView(address, nbytes, requested, BLOCK_STATES[state])
                for address, nbytes, requested, state in blocks
            )
            mapped = sum(view.nbytes for view in views if view.state != "unmapped")
            found.append(SegmentView(views[0].address, sum(view.nbytes for view in views), mapped, stream, views))
        return tuple(found)

    def _idle_count(self) -> int:
        return self._core.idle_count()

    def _used_bytes(self) -> int:
        return self._core.used_bytes()
