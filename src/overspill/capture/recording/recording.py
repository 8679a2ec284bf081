"""A recording of device memory: every allocation with its lifetime, and every op."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from overspill.core import Frame, Phase, TensorKind
from overspill.core.frames import source_of, stack_of
from overspill.core.saved import Saved
from overspill.costs.scratch import Scratch


@dataclass(frozen=True)
class Allocation:
    """One storage on the device: `nbytes` from event `start` until before event `end`.

    `end` is the number of events if the storage outlives the recording. `op` is the position of the op that made it, -1
    for none (a copy from the host is an op too). `stream` is its CUDA stream, 0 for the default one: an allocator
    reuses memory within a stream only. `frame` is the line of Python that asked for it, by position in the recording's
    `frames`, -1 for none. `shape` and `dtype` are those of the tensor that it was made for.
    """

    start: int
    end: int
    nbytes: int
    kind: TensorKind
    name: str
    layer: str
    phase: Phase
    op: int
    scratch: Scratch | None = None
    stream: int = 0
    frame: int = -1
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class RecordedOp:
    """One op on the device; `reads`, `writes` and `frame` are positions.

    The first two are positions of allocations, the last of its line in `frames`.
    """

    name: str
    layer: str
    phase: Phase
    iteration: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frame: int = -1


@dataclass(frozen=True)
class Recording(Saved):
    """A whole run on the device: construction, then `iterations` training (or inference) steps.

    `starts[i]` is the event at which iteration `i` begins, `parameters` the number of elements of all parameters.
    `frames` are lines of Python, each once for each stack that led to it. `host_bytes` are weights, gradients and
    optimizer state kept on the host for this GPU.
    """

    allocations: tuple[Allocation, ...]
    ops: tuple[RecordedOp, ...]
    starts: tuple[int, ...]
    events: int
    parameters: int = 0
    frames: tuple[Frame, ...] = ()
    host_bytes: int = 0

    def source(self, frame: int) -> str:
        """The line at `frame`, as `model.py:42 forward`; empty for -1."""
        return source_of(self.frames, (frame,))

    def stack(self, frame: int) -> tuple[Frame, ...]:
        """The line at `frame` and its callers, outermost first; empty for -1."""
        return stack_of(self.frames, frame)

    @property
    def iterations(self) -> int:
        """Number of recorded steps."""
        return len(self.starts)

    @cached_property
    def peak_requested_bytes(self) -> int:
        """Peak live bytes as requested, without scratch, rounding or an allocator."""
        changes = [0] * (self.events + 1)
        for a in self.allocations:
            changes[a.start] += a.nbytes
            changes[a.end] -= a.nbytes
        live = peak = 0
        for change in changes:
            live += change
            peak = max(peak, live)
        return peak
