"""What an eager run did to device memory: every allocation with its life, and every op that touched it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from overspill.core import Frame, Phase, TensorKind
from overspill.core.frames import source_of, stack_of
from overspill.core.saved import Saved
from overspill.costs.scratch import Scratch


@dataclass(frozen=True)
class Allocation:
    """One storage on the device: `nbytes` from the event `start` until before the event `end`.

    `end` is the number of events where the storage outlives the recording. `op` is the position of the op that made
    it, -1 for none (a copy from the host is an op too). `stream` is the CUDA stream that it was asked for on, 0 the
    default one: an allocator reuses memory within a stream only. `frame` is the line of Python that asked for it, by its
    position among the recording's `frames`, -1 for none. `shape` and `dtype` are those of the tensor that it was made for.
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
    """One op that ran on the device: what it read and wrote, by position among the allocations, and the line that ran it."""

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

    `starts[i]` is the event at which iteration `i` begins, `parameters` counts the elements of all parameters. `frames` are
    the lines of Python, each once for each stack that led to it. `host_bytes` are of weights, gradients and optimizer state that
    are kept on the host for this GPU.
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
        """The line at `frame` and its callers, the outermost first; none for -1."""
        return stack_of(self.frames, frame)

    @property
    def iterations(self) -> int:
        """How many steps were recorded."""
        return len(self.starts)

    @cached_property
    def peak_requested_bytes(self) -> int:
        """The largest number of live bytes as requested, without scratch, rounding or an allocator."""
        changes = [0] * (self.events + 1)
        for a in self.allocations:
            changes[a.start] += a.nbytes
            changes[a.end] -= a.nbytes
        live = peak = 0
        for change in changes:
            live += change
            peak = max(peak, live)
        return peak
