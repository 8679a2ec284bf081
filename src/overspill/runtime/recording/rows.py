"""Raw rows of a recorder, made into the record at the end.

Rows are plain values: an object for each would make the garbage collector run in the middle of steps.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from overspill.core import TensorKind

from .clock import Clock
from .record import Label, Measured, MemoryChange


class Marked:
    """Intervals between marks of a clock, read once the marks have passed."""

    def __init__(self) -> None:
        self._marked: deque[Any] = deque()
        self._read: list[Any] = []

    def add(self, into: list[Measured], label: Label | None, begun: Any, ended: Any) -> None:
        """Add an interval for the list `into`. The threads of lanes call it too."""
        self._marked.extend((into, label, begun, ended))

    def read(self, clock: Clock) -> None:
        """Read, in order, all intervals whose end has passed."""
        marked = self._marked
        while marked and clock.is_past(marked[3]):
            into, label, begun, ended = (marked.popleft() for _ in range(4))
            self._read += (into, label, clock.seconds(begun), clock.seconds(ended))
            clock.give_back(begun)
            clock.give_back(ended)

    def put(self) -> None:
        """Append the intervals read so far to the lists they belong to."""
        row = iter(self._read)
        for into, label, begin, end in zip(row, row, row, row, strict=True):
            into.append(Measured(label, begin, end))
        self._read.clear()


class Comings:
    """Storages that came to the device and left."""

    _COLUMNS = 6

    def __init__(self) -> None:
        self._rows: list[Any] = []

    def add(
        self, seconds: float, storage: int, nbytes: int, label: Label | None, kind: TensorKind | None, step: int
    ) -> int:
        """Add a change and return its row."""
        self._rows += (seconds, storage, nbytes, label, kind, step)
        return len(self._rows) - self._COLUMNS

    def name(self, row: int, label: Label) -> None:
        """Set the label of the storage in this row."""
        self._rows[row + 3] = label

    def be(self, row: int, kind: TensorKind | None) -> None:
        """Set the kind of the storage in this row."""
        self._rows[row + 4] = kind

    def all(self) -> list[MemoryChange]:
        """Return all changes in order, and remove them here."""
        row = iter(self._rows)
        found = [MemoryChange(*change) for change in zip(row, row, row, row, row, row, strict=True)]
        self._rows.clear()
        return found
