"""An estimate as a memory snapshot for pytorch.org/memory_viz."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from overspill.capture.recording.recording import Allocation, Recording
from overspill.placement.snapshot import Origin, Span, frames_of, write_snapshot

from .demand import Demand
from .figures import Figures
from .peak import category


def write_estimate(path: str | Path, estimate: Figures, *, capacity_bytes: int | None = None) -> None:
    """Write the simulated run of `estimate` to `path`.

    With `capacity_bytes`, the run is on a device that has this memory for its allocator. An allocation's frames name
    the tensor, the layer with the op, the lines of Python, and the phase with the iteration. Raises RequestError if the
    file cannot be written.
    """
    write_snapshot(
        path,
        estimate.demand.events,
        allocator=estimate.allocator,
        config=estimate.allocator_config,
        capacity_bytes=estimate.replayed.capacity_bytes if capacity_bytes is None else capacity_bytes,
        origins=[_origin(estimate.recording, at) for at in range(len(estimate.recording.allocations))],
        spans=_iterations(estimate.recording, estimate.demand),
    )


def _origin(recording: Recording, at: int) -> Origin:
    allocation = recording.allocations[at]
    op = recording.ops[allocation.op] if 0 <= allocation.op < len(recording.ops) else None
    iteration = _iteration(recording, allocation)
    layer = allocation.layer or "(outside layers)"
    name = op.name if op is not None else "(no op)"
    # What is made before the first iteration has no phase.
    during = allocation.phase.value if iteration else "construction"
    source = recording.source(allocation.frame)
    return Origin(
        frames=(
            (allocation.kind.value, at, allocation.name or "(unnamed)"),
            (layer, max(allocation.op, 0), name),
            *frames_of(recording.stack(allocation.frame)),
            ("iteration", iteration, during),
        ),
        category=category(allocation.kind),
        metadata=f"{during} | {layer} | {name}" + (f" | {source}" if source else ""),
    )


def _iteration(recording: Recording, allocation: Allocation) -> int:
    """Return the iteration, from 1, in which `allocation` was made; 0 before the first."""
    return sum(start <= allocation.start for start in recording.starts)


def _iterations(recording: Recording, demand: Demand) -> list[Span]:
    """Return the iterations, in events of the demand."""
    bounds = np.searchsorted(demand.rows, [*recording.starts, recording.events]).tolist()
    return [Span(f"iteration {i + 1}", bounds[i], bounds[i + 1]) for i in range(recording.iterations)]
