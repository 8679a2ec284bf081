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
    """One storage on the device, from event `start` until before event `end`."""

    start: int
    end: int
    """The number of events if the storage outlives the recording."""
    nbytes: int
    kind: TensorKind
    name: str
    layer: str
    phase: Phase
    op: int
    """The position of the op that made it, -1 for none (a copy from the host is an op too)."""
    scratch: Scratch | None = None
    stream: int = 0
    """Its CUDA stream, 0 for the default one: an allocator reuses memory within a stream only."""
    frame: int = -1
    """The line of Python that requested it, by position in the recording's `frames`; -1 for none."""
    shape: tuple[int, ...] = ()
    """The shape of the tensor that it was made for."""
    dtype: str = ""
    """The dtype of the tensor that it was made for."""


@dataclass(frozen=True)
class RecordedOp:
    """One op on the device."""

    name: str
    layer: str
    phase: Phase
    iteration: int
    reads: tuple[int, ...]
    """Positions of allocations."""
    writes: tuple[int, ...]
    """Positions of allocations."""
    frame: int = -1
    """The position of its line in the recording's `frames`; -1 for none."""
    flops: int = 0
    moved_bytes: int = 0
    """Bytes that it reads and writes; 0 for a view, which has no writes either, and where they are not known."""


@dataclass(frozen=True)
class Recording(Saved):
    """A whole run on the device: construction, then `iterations` training (or inference) steps."""

    allocations: tuple[Allocation, ...]
    ops: tuple[RecordedOp, ...]
    starts: tuple[int, ...]
    """The event at which each iteration begins."""
    events: int
    """The number of allocations and frees."""
    parameters: int = 0
    """The number of elements of all parameters."""
    frames: tuple[Frame, ...] = ()
    """Lines of Python, each once for each stack that led to it."""
    host_bytes: int = 0
    """Bytes of weights, gradients and optimizer state kept on the host for this GPU."""

    def source(self, frame: int) -> str:
        """Return the line at `frame`, as `model.py:42 forward`; empty for -1."""
        return source_of(self.frames, (frame,))

    def stack(self, frame: int) -> tuple[Frame, ...]:
        """Return the line at `frame` and its callers, outermost first; empty for -1."""
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
