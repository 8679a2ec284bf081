"""A job at other batch sizes: traced or interpolated.

Sizes that matter are traced. An interpolated figure is never trusted without a trace.
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

MOST_BATCH, MOST_TIMES = 4096, 64
"""Up to which batch the largest is looked for, and up to how many times the job's own: a trace of some models takes
time for each sample."""
_LARGEST = 1 << 24
_FAR = 1.1  # times the memory that one sample takes without a doubt, though not traced
_REACH = 16  # how far above the border luck is looked for: so many batches, or this share of them


@dataclass(frozen=True, eq=False)
class Scaling:
    """Traces a job at any batch size, on demand.

    `traces` are shared between devices.
    """

    trace: Callable[[int, int | None], Recording]
    """Records the job at a batch size, for a number of iterations; None: as many as an estimate takes."""
    device: Device
    batch: int
    allocator: str = "pytorch"
    allocator_config: Any = None
    software: Software = field(default_factory=Software)
    traces: dict[int, Recording] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Up to which batch the largest is looked for."""
        return min(max(MOST_BATCH, MOST_TIMES * self.batch), _LARGEST)

    def on(self, device: Device) -> Scaling:
        """Return the same job on another device."""
        return replace(self, device=device)

    def recording(self, batch: int) -> Recording:
        """Return the job's recording at `batch`."""
        if batch not in self.traces:
            self.traces[batch] = self.trace(batch, None)
        return self.traces[batch]

    def demand(self, batch: int) -> Demand:
        """Return the job's allocations at `batch`, from its trace."""
        return demand_of(self.recording(batch), self.device, self.software)

    def verified(self, batch: int, pair: tuple[int, int]) -> Demand:
        """Return the job's allocations at `batch`, interpolated and confirmed by a trace.

        The interpolation is between the traces of `pair`. One iteration is traced again. If all its sizes and times,
        the first update included, are the interpolated ones, so are those of later iterations, which repeat it.
        Otherwise `batch` is traced in full.
        """
        expected = None if batch in self.traces else self._interpolation(pair)
        if expected is None:
            return self.demand(batch)
        probe = demand_of(self.trace(batch, 1), self.device, self.software)
        return expected(batch).confirmed_by(probe, self.traces[pair[0]].starts) or self.demand(batch)

    def _interpolation(self, pair: tuple[int, int]) -> Callable[[int], Demand] | None:
        """Return the function that interpolates the demand at any batch size, on the line through the traces of `pair`.

        It is None for equal batches, a batch that cannot be traced, and traces of different shapes.
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
        """Return whether `demand` fits on the device, of whose memory `outside_bytes` are in use."""
        return survives(demand, self.device, outside_bytes, self.allocator, self.allocator_config)

    def minimum_capacity_bytes(self, batch: int, outside_bytes: int) -> int:
        """Return the smallest device memory that the job survives on at `batch`."""
        return minimum_capacity(self.demand(batch).events, self.allocator, self.allocator_config) + outside_bytes

    def largest_batch(self, outside_bytes: int) -> int:
        """Return the largest batch that fits, or 0 if not even one sample fits; `most` if that fits.

        The next batch size fails; both are verified. Between two traces of the same shape every size is assumed to grow
        linearly, which finds a candidate in milliseconds. Traces of the candidate and of its successor confirm their
        sizes. One that is not confirmed is traced in full. It then bounds the search for the next candidate.
        """
        fits: dict[int, bool] = {}

        def traced(batch: int) -> bool:
            if batch not in fits:
                fits[batch] = self.fits(self.verified(batch, pair), outside_bytes)
            return fits[batch]

        low, high = 0, self.most + 1  # the largest known to fit, the smallest known not to, or not looked at
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
            if high - low == 1 and low < self.most:
                low, high = self._beyond(pair, low, high, outside_bytes, traced)
        return low

    def expected_largest_batch(self, outside_bytes: int) -> int | None:
        """Return about the largest batch that fits, interpolated between two traces; None if these differ in shape."""
        pair = (self.batch, 2 * self.batch)
        if (expected := self._interpolation(pair)) is None:
            return None
        found = self._candidate(pair, 0, _LARGEST, outside_bytes)
        return found if self.fits(expected(found), outside_bytes) else 0

    def is_far_too_large(self, outside_bytes: int) -> bool:
        """Return whether one sample takes far more than there is, by the line through two traces."""
        expected = self._interpolation((self.batch, 2 * self.batch))
        larger = replace(self, device=replace(self.device, memory_bytes=int(_FAR * self.device.memory_bytes)))
        return expected is not None and not larger.fits(expected(1), outside_bytes)

    def _beyond(
        self, pair: tuple[int, int], low: int, high: int, outside_bytes: int, traced: Callable[[int], bool]
    ) -> tuple[int, int]:
        """Return the bracket, moved up if a larger batch fits after all.

        Fitting is not monotone, because of the cache.
        """
        expected = self._interpolation(pair)
        if expected is None:
            return low, high
        reach = max(_REACH, low // _REACH)
        for batch in range(min(high + reach, self.most), high, -max(1, reach // _REACH)):
            if self.fits(expected(batch), outside_bytes) and traced(batch):
                return batch, self.most + 1
        return low, high

    def _candidate(self, pair: tuple[int, int], low: int, high: int, outside_bytes: int) -> int:
        """Return the largest batch in (low, high) expected to fit by the two traces of `pair`, or the next to it."""
        unknown = high > self.most
        fallback = 2 * low if unknown and low else max(1, self.batch if unknown else (low + high) // 2)
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
