"""Write a recording by hand, for executors that are modelled instead of run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overspill.core import Phase, TensorKind
from overspill.costs.scratch import Scratch

from .recording import Allocation, RecordedOp, Recording


class Ledger:
    """Collects allocations, frees and ops; allocations and frees are numbered events."""

    def __init__(self) -> None:
        self.events = 0
        self.allocations: list[Allocation] = []
        self._ends: dict[int, int] = {}
        self._ops: list[RecordedOp] = []

    def allocate(
        self, nbytes: int, kind: TensorKind, name: str, phase: Phase, layer: str = "", scratch: Scratch | None = None
    ) -> int:
        """Add an allocation of `nbytes`, which lives until `end`; return its position."""
        self.allocations.append(Allocation(self.events, -1, nbytes, kind, name, layer, phase, len(self._ops), scratch))
        self.events += 1
        return len(self.allocations) - 1

    def end(self, allocation: int) -> None:
        """Free an allocation."""
        self._ends[allocation] = self.events
        self.events += 1

    def rename(self, allocation: int, kind: TensorKind) -> None:
        """Change what an allocation is."""
        self.allocations[allocation] = replace(self.allocations[allocation], kind=kind)

    def has_ended(self, allocation: int) -> bool:
        """Return whether an allocation was freed."""
        return allocation in self._ends

    def add(self, op: RecordedOp) -> None:
        """Add an op."""
        self._ops.append(op)

    def recording(self, starts: Sequence[int], parameters: int) -> Recording:
        """Return the recording so far, with iterations that began at the events `starts`."""
        allocations = (replace(a, end=self._ends.get(i, self.events)) for i, a in enumerate(self.allocations))
        return Recording(tuple(allocations), tuple(self._ops), tuple(starts), self.events, parameters)
