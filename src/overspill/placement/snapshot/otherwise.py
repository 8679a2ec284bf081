"""What a recorded job would hold of the device with each live allocator, once planned addresses are in force."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overspill.placement.allocators.caching_config import CachingConfig
from overspill.placement.allocators.planned import PlannedAllocator
from overspill.placement.allocators.two_ended import LEARNING
from overspill.placement.replay import replay, replay_on

from .read import Snapshot
from .start import events_of


@dataclass(frozen=True)
class Otherwise:
    """Peaks of reserved bytes on an unlimited device, from where the last plan was in force. Simulated.

    Without a plan, because no step was recorded twice, they are of the whole recording.
    """

    since: int | None
    """That event; None: there was no plan."""
    events: int
    requests: int
    planned_requests: int
    """Requests that got their planned address, of all that were recorded."""
    requested_bytes: int
    recorded_bytes: int
    """With the settings of the replay."""
    expandable_bytes: int
    planned_bytes: int
    chunked_bytes: int
    gtbm_bytes: int


def otherwise(snapshot: Snapshot, device: int, config: CachingConfig) -> Otherwise:
    """Return what the recording of `device`, made with `config`, would hold otherwise."""
    events = events_of(snapshot, device, config)
    allocator = PlannedAllocator()
    planned = replay_on(allocator, events, curves=True)
    counts = allocator.counts
    first = max(counts.since, 0)
    # The other allocators over the same events, and their peaks from there on.
    settings = replace(config, garbage_collection_threshold=0.0, per_process_memory_fraction=1.0)
    found = [replay(events, config=c, curves=True) for c in (settings, CachingConfig(expandable_segments=True))]
    found += [planned, replay(events, "chunked", curves=True), replay(events, "gtbm", config=LEARNING, curves=True)]
    peaks = [int(run.reserved[first:].max(initial=0)) for run in found if run.reserved is not None]
    assert planned.requested is not None
    return Otherwise(
        since=None if counts.since < 0 else counts.since,
        events=len(events),
        requests=counts.planned + counts.carried + counts.displaced + counts.foreign,
        planned_requests=counts.planned,
        requested_bytes=int(planned.requested[first:].max(initial=0)),
        recorded_bytes=peaks[0],
        expandable_bytes=peaks[1],
        planned_bytes=peaks[2],
        chunked_bytes=peaks[3],
        gtbm_bytes=peaks[4],
    )
