"""The memory at the peak, by category, by layer, and by op."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overspill.capture.recording.recording import Recording
from overspill.core import Phase, TensorKind
from overspill.placement.allocators.result import Replay

from .demand import Demand

# DNNMem, FSE 2020, Table 2, in the order of its dimensions.
CATEGORIES = (
    "weights", "weight_gradients", "optimizer_state", "buffers", "inputs", "forward_outputs", "output_gradients",
    "workspaces", "temporaries", "internal_fragmentation", "allocator_reservation", "context", "communication",
)  # fmt: skip
_CATEGORY_OF = {
    TensorKind.PARAMETER: "weights",
    TensorKind.GRADIENT: "weight_gradients",
    TensorKind.OPTIMIZER_STATE: "optimizer_state",
    TensorKind.BUFFER: "buffers",
    TensorKind.INPUT: "inputs",
    TensorKind.ACTIVATION: "forward_outputs",
    TensorKind.OUTPUT_GRADIENT: "output_gradients",
    TensorKind.WORKSPACE: "workspaces",
    TensorKind.TEMPORARY: "temporaries",
    TensorKind.COMMUNICATION: "communication",
}
MOST_TENSORS = 30
"""The number of largest tensors at the peak that are named."""


@dataclass(frozen=True)
class Peak:
    """The moment at which most bytes are allocated."""

    iteration: int
    phase: Phase
    layer: str
    op: str
    """The op that reached it."""
    by_category: dict[str, int]
    """Requested bytes by category of DNNMem."""
    by_layer: dict[str, int]
    """Bytes of activations, gradients of outputs and temporaries, by the layer that made them, largest first."""
    ops: tuple[str, ...]
    """The ops around the moment."""
    at: int
    """The position in `ops` of the op that reached the peak, or -1."""
    requested_bytes: int
    source: str
    """The line of Python of the op; empty where none is known."""
    largest: tuple[int, ...]
    """Positions of the largest live allocations."""
    live: tuple[int, ...]
    """Positions of all live allocations."""


def category(kind: TensorKind) -> str:
    """Return the category of DNNMem's Table 2 that a kind of tensor belongs to."""
    return _CATEGORY_OF[kind]


def kind_of(name: str) -> TensorKind | None:
    """Return the kind of tensor of a category, or None for one without a kind, as the context."""
    return next((kind for kind, found in _CATEGORY_OF.items() if found == name), None)


def peak_of(recording: Recording, demand: Demand, replayed: Replay) -> Peak:
    """Return the peak of allocated bytes of a replay of `demand`."""
    moment = int(demand.rows[replayed.peak_allocated_at]) if len(demand.rows) else 0
    # All that is live then, by category and by layer.
    live = np.flatnonzero((demand.start <= moment) & (demand.end > moment) & (demand.nbytes > 0))
    by_category: dict[str, int] = {}
    by_layer: dict[str, int] = {}
    for position in live.tolist():
        allocation, nbytes = recording.allocations[position], int(demand.nbytes[position])
        name = category(allocation.kind)
        by_category[name] = by_category.get(name, 0) + nbytes
        layer = allocation.layer or "(outside layers)"
        if allocation.kind not in {TensorKind.PARAMETER, TensorKind.BUFFER, TensorKind.OPTIMIZER_STATE}:
            by_layer[layer] = by_layer.get(layer, 0) + nbytes
    # The op that reached the peak, and those around it.
    reached = int(np.flatnonzero(demand.start == moment)[0]) if (demand.start == moment).any() else -1
    at = recording.allocations[reached].op if reached >= 0 else -1
    op = recording.ops[at] if 0 <= at < len(recording.ops) else None
    around = recording.ops[max(at - 3, 0) : at + 4] if op is not None else ()
    return Peak(
        iteration=op.iteration if op is not None else 0,
        phase=op.phase if op is not None else Phase.FORWARD,
        layer=op.layer if op is not None else "",
        op=op.name if op is not None else "",
        by_category=by_category,
        by_layer=dict(sorted(by_layer.items(), key=lambda item: -item[1])),
        ops=tuple(f"{other.phase.value} {other.layer or '-'} {other.name}" for other in around),
        at=min(at, 3) if op is not None else -1,
        requested_bytes=sum(by_category.values()),
        source="" if op is None else recording.source(op.frame),
        largest=tuple(live[np.argsort(-demand.nbytes[live], kind="stable")][:MOST_TENSORS].tolist()),
        live=tuple(live.tolist()),
    )
