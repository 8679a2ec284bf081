"""Power that vDNN's transfers add to the board.

It is a model for vDNN, MICRO 2016, §V-D, as no board is measured. The paper reads power off the board and gives no
model. Ours is a sum of four parts. The board takes power when idle. Its cores take power by their arithmetic, DRAM by
the bytes that ops and transfers move, and the link by the bytes that transfers move. A board that convolves at full
speed and fills its DRAM's bandwidth takes its specified power, which gives the cores their share.
"""

from __future__ import annotations

from collections.abc import Iterator

from overspill.core import Verb
from overspill_papers.papers.run import PolicyRun

BOARD_WATTS = 250.0
"""GeForce GTX Titan X, thermal design power by its specification."""
IDLE_WATTS = 15.0
"""Assumed: the same board with nothing to do."""
DRAM_JOULES_PER_BYTE = 8 * 14e-12
"""Assumed: 14 pJ a bit, of GDDR5 with its interface."""
LINK_JOULES_PER_BYTE = 8 * 6e-12
"""Assumed: 6 pJ a bit, of a PCI Express interface of the third generation on the GPU's side."""

_TRANSFERS = (Verb.OFFLOAD, Verb.PREFETCH)
_RUNS = (Verb.RUN, Verb.RECOMPUTE)


def most_watts(run: PolicyRun, scale: float = 1.0) -> float:
    """Return the most watts that the board takes at any moment of a step.

    Transfers take `scale` times the assumed power.
    """
    levels = _levels(run, scale)
    return IDLE_WATTS + max((watts for _, watts in levels), default=0.0)


def _levels(run: PolicyRun, scale: float) -> Iterator[tuple[float, float]]:
    """Yield times, and the watts above idle from then on, in order."""
    changes: list[tuple[float, float]] = []
    for start, end, watts in _draws(run, scale):
        changes += [(start, watts), (end, -watts)]
    level = 0.0
    # An end comes before a start at the same moment.
    for now, watts in sorted(changes):
        level += watts
        yield now, level


def _draws(run: PolicyRun, scale: float) -> Iterator[tuple[float, float, float]]:
    """Yield the start, end and watts of each op and transfer."""
    dram = run.device.memory_bytes_per_second * DRAM_JOULES_PER_BYTE
    cores = BOARD_WATTS - IDLE_WATTS - dram
    fastest = run.device.flops_per_second["float32"] * run.device.efficiency["conv"]
    for event in run.timeline.events:
        seconds = event.end_seconds - event.start_seconds
        if seconds <= 0:
            continue
        if event.verb in _RUNS:
            op = run.graph.ops[event.target]
            moved = min(op.moved_bytes * DRAM_JOULES_PER_BYTE / seconds, dram)
            yield event.start_seconds, event.end_seconds, moved + cores * min(op.flops / seconds / fastest, 1.0)
        elif event.verb in _TRANSFERS:
            nbytes = run.graph.tensors[event.target].nbytes
            rate = nbytes / seconds
            yield event.start_seconds, event.end_seconds, scale * rate * (DRAM_JOULES_PER_BYTE + LINK_JOULES_PER_BYTE)
