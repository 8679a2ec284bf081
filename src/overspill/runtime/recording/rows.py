"""What a recorder keeps while it is told: rows of plain values, which become the record when it is over.

An object for each would be one that the garbage collector counts, and that would run in the middle of steps for them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from overspill.core import TensorKind

from .clock import Clock
from .record import Change, Label, Measured


class Marked:
    """What began and ended at marks of a clock, which are read once they have passed."""

    def __init__(self) -> None:
        self._marked: deque[Any] = deque()
        self._read: list[Any] = []

    def add(self, into: list[Measured], label: Label | None, begun: Any, ended: Any) -> None:
        """One more, for the list `into`. Lanes' threads call it too."""
        self._marked.extend((into, label, begun, ended))

    def read(self, clock: Clock) -> None:
        """Ask the clock about all that has passed, in order."""
        marked = self._marked
        while marked and clock.is_past(marked[3]):
            into, label, begun, ended = (marked.popleft() for _ in range(4))
            self._read += (into, label, clock.seconds(begun), clock.seconds(ended))
            clock.give_back(begun)
            clock.give_back(ended)

    def put(self) -> None:
        """Let what was read be where it belongs."""
        row = iter(self._read)
        for into, label, begin, end in zip(row, row, row, row, strict=True):
            into.append(Measured(label, begin, end))
        self._read.clear()


class Comings:
    """Storages that came and went."""

    _COLUMNS = 6

    def __init__(self) -> None:
        self._rows: list[Any] = []

    def add(
        self, seconds: float, storage: int, nbytes: int, label: Label | None, kind: TensorKind | None, step: int
    ) -> int:
        """One more change; the number of its row."""
        self._rows += (seconds, storage, nbytes, label, kind, step)
        return len(self._rows) - self._COLUMNS

    def name(self, row: int, label: Label) -> None:
        """That storage is the tensor that `label` says."""
        self._rows[row + 3] = label

    def be(self, row: int, kind: TensorKind | None) -> None:
        """That storage is of a kind."""
        self._rows[row + 4] = kind

    def all(self) -> list[Change]:
        """All changes in order, which are here no longer."""
        row = iter(self._rows)
        found = [Change(*change) for change in zip(row, row, row, row, row, row, strict=True)]
        self._rows.clear()
        return found
