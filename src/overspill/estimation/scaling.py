"""A job at other batch sizes: traced or interpolated.

It is traced where it matters, and what is interpolated is never trusted untraced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from overspill.capture.recording.recording import Recording
from overspill.core import Device
from overspill.core.errors import OverspillError
from overspill.costs.scratch import Software
from overspill.placement.replay import minimum_capacity

from .demand import Demand, demand_of, survives

_LARGEST = 1 << 24
_REACH = 16  # how far above the border luck is looked for: so many batches, or this share of them


@dataclass(frozen=True, eq=False)
class Scaling:
    """Traces a job at any batch size, on demand.

    `traces` are shared between devices. `trace(batch, iterations)` records that many iterations at a batch size, None:
    as many as an estimate takes.
    """

    trace: Callable[[int, int | None], Recording]
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
            self.traces[batch] = self.trace(batch, None)
        return self.traces[batch]

    def demand(self, batch: int) -> Demand:
        """The job's allocations at `batch`, from its trace."""
        return demand_of(self.recording(batch), self.device, self.software)

    def verified(self, batch: int, pair: tuple[int, int]) -> Demand:
        """The job's allocations at `batch`, interpolated and confirmed by a trace.

        They are between the traces of `pair`. One iteration is traced anew. Where everything in it, the first update
        included, has the sizes and times that were interpolated, so have the later iterations, which do the same again;
        else `batch` is traced in full.
        """
        expected = None if batch in self.traces else self._interpolation(pair)
        if expected is None:
            return self.demand(batch)
        probe = demand_of(self.trace(batch, 1), self.device, self.software)
        return expected(batch).confirmed_by(probe, self.traces[pair[0]].starts) or self.demand(batch)

    def _interpolation(self, pair: tuple[int, int]) -> Callable[[int], Demand] | None:
        """The demand at any batch size, by interpolation, or None.

        It is on the line through the traces of `pair`; None where they make no line.
        """
        if pair[0] == pair[1]:
            return None
        try:
            small, large = (self.demand(batch) for batch in pair)
        except OverspillError:
            return None
        if not small.same_shape(large):
            return None
        return lambda batch: small.between(large, (batch - pair[0]) / (pair[1] - pair[0]))

    def fits(self, demand: Demand, outside_bytes: int) -> bool:
        """Whether `demand` fits on the device. `outside_bytes` of its memory are taken."""
        return survives(demand, self.device, outside_bytes, self.allocator, self.allocator_config)

    def minimum_capacity_bytes(self, batch: int, outside_bytes: int) -> int:
        """The smallest device memory that the job survives on at `batch`."""
        return minimum_capacity(self.demand(batch).events, self.allocator, self.allocator_config) + outside_bytes

    def largest_batch(self, outside_bytes: int) -> int:
        """The largest batch that fits, or 0.

        The next one fails; both are verified. 0 when not even one sample fits. Between two traces of the same shape
        every size is taken to grow evenly, which finds a candidate in milliseconds; a trace of the candidate and one of
        its successor confirm their sizes. Where one does not, it is traced in full, and becomes one of the two that the
        next candidate is found between.
        """
        fits: dict[int, bool] = {}

        def traced(batch: int) -> bool:
            if batch not in fits:
                fits[batch] = self.fits(self.verified(batch, pair), outside_bytes)
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
            if high - low == 1:
                low, high = self._beyond(pair, low, high, outside_bytes, traced)
        return low

    def _beyond(
        self, pair: tuple[int, int], low: int, high: int, outside_bytes: int, traced: Callable[[int], bool]
    ) -> tuple[int, int]:
        """The bracket moved up where a larger batch fits after all. The cache's luck is not monotone."""
        expected = self._interpolation(pair)
        if expected is None:
            return low, high
        reach = max(_REACH, low // _REACH)
        for batch in range(high + reach, high, -max(1, reach // _REACH)):
            if self.fits(expected(batch), outside_bytes) and traced(batch):
                return batch, _LARGEST
        return low, high

    def _candidate(self, pair: tuple[int, int], low: int, high: int, outside_bytes: int) -> int:
        """The largest batch in (low, high) expected to fit, as the two traces of `pair` say, or the next to it."""
        fallback = 2 * low if high == _LARGEST and low else max(1, (low + high) // 2 if high < _LARGEST else self.batch)
        fallback = min(max(fallback, low + 1), high - 1)
        # Without a line, halve the bracket.
        expected = self._interpolation(pair)
        if expected is None:
            return fallback

        def holds(batch: int) -> bool:
            return self.fits(expected(batch), outside_bytes)

        # Double, then halve, on the interpolated demand.
        bottom, top = low, low + 1
        while top < high and holds(top):
            bottom, top = top, min(2 * top, high)
        while top - bottom > 1:
            middle = (bottom + top) // 2
            bottom, top = (middle, top) if holds(middle) else (bottom, middle)
        return min(max(bottom, low + 1), high - 1)
