"""What device, host memory and disk take of a job whose weights, gradients and optimizer state leave the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device, Phase, TensorKind

from .demand import Demand
from .figures import Figures

STATE = (TensorKind.PARAMETER, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE)


@dataclass(frozen=True)
class DiskShare:
    """State on the disk."""

    staying_bytes: int
    """What the disk holds if all activations stay on the device."""
    disk_bytes: int
    """The least that it holds: activations may leave or be recomputed, for state to stay on the device instead."""
    written_bytes: int
    """The least that each step writes there: frozen weights are only read."""
    seconds: float
    """The least that the disk is busy for in each step."""


@dataclass(frozen=True)
class StateInStore:
    """Bytes by place, as far as they are known without a plan."""

    state_bytes: int
    """The most that weights, gradients and optimizer state take at once."""
    gradient_bytes: int
    """The most that gradients take of it."""
    device_bytes: int
    """What the device needs if state is there for the ops that use it, and all else stays."""
    least_device_bytes: int
    """What it needs for the largest op or update alone."""
    kept_bytes: int
    """State that the rest of the device holds."""
    host_bytes: int
    """State in host memory."""
    is_bounded: bool
    """Whether the size of the device is known, so that the least on the disk is a lower bound of any plan."""
    loop: DiskShare
    """The rest, in a loop that has all gradients at once."""
    whole_step: DiskShare
    """The rest under `train_step`, which updates with each gradient as soon as it is complete."""


def state_in_store(made: Figures, device: Device, *, fills: bool) -> StateInStore:
    """Return the bytes by place of an estimate, with the host memory and the disk of the store that `device` has.

    Without a disk all is in host memory. With `fills`, state that finds space on the device stays there; the most that
    any plan keeps there is all but the context, and the rest is what the disk holds and moves at least. The update is
    counted as one parameter after another.
    """
    demand = made.demand
    allocations, ops = made.recording.allocations, made.recording.ops
    kinds = {kind: np.array([a.kind is kind for a in allocations], dtype=np.bool_) for kind in STATE}
    is_state = np.logical_or.reduce([*kinds.values()])
    state = int(_live(demand, is_state).max(initial=0))
    others = _live(demand, ~is_state)
    # Each op of forward and backward, where what it makes begins.
    used = [[] if op.phase is Phase.UPDATE else [*{*op.reads, *op.writes}] for op in ops]
    touched = [sum(int(demand.nbytes[i]) for i in found if is_state[i]) for found in used]
    alone = [sum(int(demand.nbytes[i]) for i in found) for found in used]
    most = 0
    for position, it in enumerate(allocations):
        if 0 <= it.op < len(ops) and ops[it.op].phase is not Phase.UPDATE:
            most = max(most, int(others[it.start]) + touched[it.op])
            alone[it.op] += int(demand.nbytes[position]) * (it.scratch is not None)
    # The largest update: a parameter with its share of gradients, state and temporaries, next to what handles hold.
    updating = np.array([0 <= a.op < len(ops) and ops[a.op].phase is Phase.UPDATE for a in allocations], dtype=np.bool_)
    updated = {i for op in ops if op.phase is Phase.UPDATE for i in op.writes}
    weights = [int(demand.nbytes[i]) for i in np.flatnonzero(kinds[TensorKind.PARAMETER]) if i in updated]
    frozen = int(demand.nbytes[kinds[TensorKind.PARAMETER]].sum()) - sum(weights)
    whole = state - frozen + int(_live(demand, updating & ~is_state).max(initial=0))
    largest = max(weights, default=0) * whole // max(1, sum(weights))
    largest += int(demand.nbytes[demand.scratch & (demand.end == demand.count)].sum())
    needed = made.outside_bytes + max(most, largest)
    kept = max(0, min(state, device.memory_bytes - needed)) if fills else 0
    host = min(state - kept, device.host_bytes or state)

    in_use = {i for op in ops for i in (*op.reads, *op.writes)}
    idle = sum(int(demand.nbytes[i]) for i in np.flatnonzero(kinds[TensorKind.PARAMETER]) if i not in in_use)
    most_kept = max(kept, device.memory_bytes - (made.context + made.communication).low) if fills else 0

    def share(of: int) -> DiskShare:
        staying, below = (max(0, of - on_device - (device.host_bytes or state)) for on_device in (kept, most_kept))
        # All state that changes between two steps is written behind that, and all in use is read again.
        written = max(0, below - frozen)
        seconds = device.disk_seconds(max(0, below - idle), written) if below else 0.0
        return DiskShare(staying, below, written, seconds)

    gradients = int(_live(demand, kinds[TensorKind.GRADIENT]).max(initial=0))
    return StateInStore(
        state_bytes=state,
        gradient_bytes=gradients,
        device_bytes=needed,
        least_device_bytes=made.outside_bytes + max([largest, *alone]),
        kept_bytes=kept,
        host_bytes=host,
        is_bounded=fills,
        loop=share(state),
        whole_step=share(state - gradients),
    )


def _live(demand: Demand, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the bytes of the `chosen` allocations that are live behind each event."""
    changes = np.zeros(demand.count + 1, dtype=np.int64)
    np.add.at(changes, demand.start[chosen], demand.nbytes[chosen])
    np.subtract.at(changes, demand.end[chosen], demand.nbytes[chosen])
    return np.cumsum(changes)
