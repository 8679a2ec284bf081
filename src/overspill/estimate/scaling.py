"""A job at other batch sizes: traced where it matters, interpolated in between, never trusted untraced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from overspill.capture.recording import Recording
from overspill.core import Device
from overspill.core.errors import OverspillError
from overspill.costs.scratch import Software
from overspill.placement.replay import minimum_capacity, replay

from .demand import Demand, demand_of

_LARGEST = 1 << 24


@dataclass(frozen=True, eq=False)
class Scaling:
    """Traces a job at any batch size, on demand; `traces` are shared between devices."""

    trace: Callable[[int], Recording]
    device: Device
    batch: int
    allocator: str = "pytorch"
    allocator_config: Any = None
    software: Software = field(default_factory=Software)
    traces: dict[int, Recording] = field(default_factory=dict)

    def on(self, device: Device) -> Scaling:
        """The same job on another device."""
        return replace(self, device=device)

    def recording(self, batch: int) -> Recording:
        """The job's recording at `batch`."""
        if batch not in self.traces:
            self.traces[batch] = self.trace(batch)
        return self.traces[batch]

    def demand(self, batch: int) -> Demand:
        """What the job asks for at `batch`, from its trace."""
        return demand_of(self.recording(batch), self.device, self.software)

    def fits(self, demand: Demand, outside_bytes: int) -> bool:
        """Whether `demand` is served on the device, of whose memory `outside_bytes` are taken."""
        capacity = self.device.memory_bytes - outside_bytes
        return (
            capacity > 0
            and replay(demand.events, self.allocator, capacity_bytes=capacity, config=self.allocator_config).fits
        )

    def minimum_capacity_bytes(self, batch: int, outside_bytes: int) -> int:
        """The smallest device memory that the job survives on at `batch`."""
        return minimum_capacity(self.demand(batch).events, self.allocator, self.allocator_config) + outside_bytes

    def largest_batch(self, outside_bytes: int) -> int:
        """The largest batch that fits, with the next one failing; both are traced. 0 when not even one sample fits.

        Between two traces of the same shape every size is taken to grow evenly, which finds a candidate in
        milliseconds; the candidate and its successor are then traced, and where a trace disagrees, it becomes one of
        the two that the next candidate is found between.
        """
        fits: dict[int, bool] = {}

        def traced(batch: int) -> bool:
            if batch not in fits:
                fits[batch] = self.fits(self.demand(batch), outside_bytes)
            return fits[batch]

        low, high = 0, _LARGEST  # the largest known to fit, the smallest known not to
        pair = (self.batch, 2 * self.batch)
        step = 1
        while high - low > 1:
            candidate = self._candidate(pair, low, high, outside_bytes)
            # A trace on each side of the predicted border; where one disagrees, ever further that way.
            while low < candidate < high:
                if traced(candidate):
                    low, candidate = candidate, candidate + step
                else:
                    high, candidate = candidate, candidate - step
                if len(fits) > 1:
                    step *= 2
            near = sorted(self.traces, key=lambda batch: min(abs(batch - low), abs(batch - high)))[:2]
            pair = (min(near), max(near))
        return low

    def _candidate(self, pair: tuple[int, int], low: int, high: int, outside_bytes: int) -> int:
        """The batch in (low, high) that the two traces of `pair` say is the largest to fit, or the next to it."""
        fallback = 2 * low if high == _LARGEST and low else max(1, (low + high) // 2 if high < _LARGEST else self.batch)
        fallback = min(max(fallback, low + 1), high - 1)
        try:
            small, large = (self.demand(batch) for batch in pair)
        except OverspillError:
            return fallback
        if pair[0] == pair[1] or not small.same_shape(large):
            return fallback

        def holds(batch: int) -> bool:
            return self.fits(small.between(large, (batch - pair[0]) / (pair[1] - pair[0])), outside_bytes)

        bottom, top = low, low + 1
        while top < high and holds(top):
            bottom, top = top, min(2 * top, high)
        while top - bottom > 1:
            middle = (bottom + top) // 2
            bottom, top = (middle, top) if holds(middle) else (bottom, middle)
        return min(max(bottom, low + 1), high - 1)
