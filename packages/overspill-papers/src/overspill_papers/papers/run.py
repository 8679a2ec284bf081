"""A policy's run of a paper's step: its memory and time.

Memory is measured at the addresses of an allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from overspill.core import Device, Graph, LayerType, Schedule, Timeline, Verb
from overspill.placement import Events, Replay, replay
from overspill.placement.allocators.two_ended import TRIAL_POOL_BYTES, TwoEndedConfig
from overspill.simulate import trace_of
from overspill_papers.placement import CnmemConfig


@dataclass(frozen=True)
class PaperPool:
    """An allocator by name, with its settings."""

    allocator: str
    config: Any = None


@dataclass(frozen=True)
class PolicyRun:
    """One policy's schedule of a setting, checked and on the clock."""

    graph: Graph
    device: Device
    schedule: Schedule
    peak_bytes: int
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.timeline.step_seconds

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that a step sends to the host."""
        return sum(self.graph.tensors[t].nbytes for t in self.schedule.targets(Verb.OFFLOAD))

    @cached_property
    def events(self) -> Events:
        """The allocations and frees of a step."""
        return Events.of(trace_of(self.graph, self.schedule))

    @cached_property
    def cnmem(self) -> Replay:
        """The step in a CNMeM pool that is never full, with its curves."""
        config = CnmemConfig(pool_bytes=TRIAL_POOL_BYTES, grows=False)
        return replay(self.events, "cnmem", config=config, request_bytes=0)

    @property
    def pool_bytes(self) -> int:
        """The most bytes that CNMeM has allocated at once."""
        return self.cnmem.peak_allocated_bytes

    @property
    def spread_bytes(self) -> int:
        """Bytes of CNMeM's pool in use, with fragmentation.

        They span from its start to the end of the block with the highest address.
        """
        return _peak_spread(self.cnmem)

    @cached_property
    def two_ended_events(self) -> Events:
        """The same events; among simultaneous allocations, the tensors that more layers need come first."""
        return Events.of(trace_of(self.graph, self.schedule), by_references=True)

    @cached_property
    def two_ended(self) -> Replay:
        """The step in Dymem's pool (GTBM) whose main space is never full, with its curves."""
        return replay(self.two_ended_events, "gtbm", config=TwoEndedConfig(TRIAL_POOL_BYTES), request_bytes=0)

    @property
    def two_ended_bytes(self) -> int:
        """Bytes of Dymem's pool in use, as its Fig. 15 counts them.

        They are the most from both ends of the main space and in the incremental space.
        """
        return _peak_spread(self.two_ended)

    def reserved_bytes(self, pool: PaperPool) -> int:
        """Return the most device memory that `pool` holds for repeated steps, on the device if it fits there."""
        done = self._replayed(pool, self.device.usable_bytes)
        return (done if done.fits else self._replayed(pool)).peak_device_bytes

    def fits(self, pool: PaperPool) -> bool:
        """Return whether the step and its repetition survive in `pool` on the device."""
        return self._replayed(pool, self.device.usable_bytes).fits

    def mapped_bytes(self, pool: PaperPool) -> int:
        """Return the bytes that `pool`, of virtual addresses, maps in a step that repeats another.

        Where the device has no room for the step, it is as if it had.
        """
        done = self._replayed(pool, self.device.usable_bytes)
        events = (done if done.fits else self._replayed(pool)).segment_events
        return sum(e.nbytes for e in events if e.action == "segment_map" and e.at >= len(self.events))

    def seconds_of(self, layer: LayerType) -> float:
        """Return the seconds in which ops of layers of this type ran."""
        runs = (e for e in self.timeline.events if e.verb in (Verb.RUN, Verb.RECOMPUTE))
        return sum(e.end_seconds - e.start_seconds for e in runs if self.graph.ops[e.target].layer_type is layer)

    def _replayed(self, pool: PaperPool, capacity_bytes: int | None = None) -> Replay:
        twice = self.events.repeated(2)
        return replay(twice, pool.allocator, config=pool.config, capacity_bytes=capacity_bytes)


def _peak_spread(done: Replay) -> int:
    assert done.spread is not None
    return int(np.max(done.spread, initial=0))
