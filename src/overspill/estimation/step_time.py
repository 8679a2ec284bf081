"""The simulated time of a recorded step."""

from __future__ import annotations

from overspill.capture.recording.graph import graph_of
from overspill.capture.recording.recording import Recording
from overspill.core import Device, Phase
from overspill.costs import op_seconds, with_algorithms


def step_seconds(recording: Recording, device: Device, repeats: float = 1.0) -> float:
    """Return the seconds of a steady step of `recording` on `device`, its ops one after another.

    Forward and backward run `repeats` times as often as recorded, for other numbers of micro-batches.
    """
    graph = with_algorithms(graph_of(recording, "step"), device)
    timed = zip(graph.ops, op_seconds(graph, device), strict=True)
    return sum(seconds * (1.0 if op.phase is Phase.UPDATE else repeats) for op, seconds in timed)
