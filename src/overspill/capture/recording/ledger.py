"""What a framework's executor asks of the device, written down in order: for executors that are followed, not run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overspill.core import Phase, TensorKind
from overspill.costs.scratch import Scratch

from .recording import Allocation, RecordedOp, Recording


class Ledger:
    """Allocations and their ends, an event each, and the ops in between."""

    def __init__(self) -> None:
        self.events = 0
        self.allocations: list[Allocation] = []
        self._ends: dict[int, int] = {}
        self._ops: list[RecordedOp] = []

    def allocate(
        self, nbytes: int, kind: TensorKind, name: str, phase: Phase, layer: str = "", scratch: Scratch | None = None
    ) -> int:
        """A new allocation, by its position; it stays until its end is told."""
        self.allocations.append(Allocation(self.events, -1, nbytes, kind, name, layer, phase, len(self._ops), scratch))
        self.events += 1
        return len(self.allocations) - 1

    def end(self, allocation: int) -> None:
        """An allocation is given back."""
        self._ends[allocation] = self.events
        self.events += 1

    def has_ended(self, allocation: int) -> bool:
        """Whether an allocation was given back."""
        return allocation in self._ends

    def add(self, op: RecordedOp) -> None:
        """An op runs."""
        self._ops.append(op)

    def recording(self, starts: Sequence[int], parameters: int) -> Recording:
        """All that was told, of iterations that began at the events `starts`."""
        allocations = (replace(a, end=self._ends.get(i, self.events)) for i, a in enumerate(self.allocations))
        return Recording(tuple(allocations), tuple(self._ops), tuple(starts), self.events, parameters)
