"""Dymem's sizing of the main space: from a first run, then by trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overspill.core.errors import OutOfMemoryError, RequestError
from overspill.core.units import format_bytes
from overspill.placement.allocators.result import Replay
from overspill.placement.allocators.two_ended import (
    BETA_BYTES,
    FIRST_POOL_BYTES,
    TRIAL_POOL_BYTES,
    TwoEndedConfig,
    needed_pool_bytes,
)
from overspill.placement.events import Events
from overspill.placement.replay import replay


@dataclass(frozen=True)
class PoolSizing:
    """Main space bytes of each iteration, and the number of failed attempts."""

    pool_bytes: tuple[int, ...]
    failures: int

    @property
    def failure_rate(self) -> float:
        """The share of all attempts at an iteration that failed (Table 2)."""
        return self.failures / (self.failures + len(self.pool_bytes))


def size_pool(
    iterations: Sequence[Events],
    *,
    first_bytes: int = FIRST_POOL_BYTES,
    beta_bytes: int = BETA_BYTES,
    capacity_bytes: int | None = None,
) -> PoolSizing:
    """Return the main spaces that Dymem reaches over these iterations.

    The device has `capacity_bytes` (None: unlimited). The first iteration runs in `first_bytes`. Then the smallest gap
    that it left between the two ends is removed, except for `beta_bytes`. An iteration that fails is restarted with
    `beta_bytes` more (§3.3.3, §5.5). Raises RequestError without an iteration or a β, and OutOfMemoryError if an
    iteration
    fails in the first main space, or in any.
    """
    if not iterations or beta_bytes < 1:
        raise RequestError("a pool is sized by iterations, at least one, and beta_bytes, at least 1")

    def run(events: Events, pool_bytes: int, request_bytes: int | None = None) -> Replay:
        config = TwoEndedConfig(pool_bytes, grows=False)
        return replay(events, "gtbm", capacity_bytes=capacity_bytes, config=config, request_bytes=request_bytes)

    # The first iteration gives the size, later ones enlarge it.
    first = run(iterations[0], first_bytes, request_bytes=0)
    if not first.fits:
        raise _no_room(iterations[0], first_bytes, capacity_bytes)
    pools, failures = [first_bytes], 0
    pool_bytes = needed_pool_bytes(first) + beta_bytes
    for events in iterations[1:]:
        # More by trial, as far as the device goes.
        while not run(events, pool_bytes).fits:
            largest = TRIAL_POOL_BYTES if capacity_bytes is None else capacity_bytes
            if pool_bytes >= largest or not run(events, largest).fits:
                raise _no_room(events, largest, capacity_bytes)
            failures += 1
            pool_bytes += beta_bytes
        pools.append(pool_bytes)
    return PoolSizing(tuple(pools), failures)


def _no_room(events: Events, pool_bytes: int, capacity_bytes: int | None) -> OutOfMemoryError:
    live = events.peak_requested_bytes
    return OutOfMemoryError(
        f"an iteration with {format_bytes(live)} live at once fails in a main space of {format_bytes(pool_bytes)}",
        requested_bytes=live,
        reserved_bytes=pool_bytes,
        capacity_bytes=capacity_bytes,
    )
