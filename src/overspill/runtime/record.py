"""What a run on the CPU did when, as it was measured: ops, copies, waits, and every storage that came and went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from overspill.core import Graph, Verb


class Label(NamedTuple):
    """What an instruction of a lowered graph does: `target` is an op or a tensor of `graph`, by `verb`."""

    graph: Graph
    verb: Verb
    target: int


class Measured(NamedTuple):
    """What ran from when to when, in seconds of the record; without a label it is a move between two steps."""

    label: Label | None
    begin_seconds: float
    end_seconds: float


class Change(NamedTuple):
    """A storage of `nbytes` (below zero: it is gone) on the device, by its key, during what `label` says, in step `step`."""

    seconds: float
    storage: int
    nbytes: int
    label: Label | None
    step: int


class RunRecord:
    """The measured times of one run, in seconds since it was made. Lists have things in the order in which they ended.

    `compute` is what the thread that trains did: ops, and waits for transfers. `copies` are those of the lanes, by verb.
    """

    def __init__(self) -> None:
        self.compute: list[Measured] = []
        self.copies: dict[Verb, list[Measured]] = {Verb.OFFLOAD: [], Verb.PREFETCH: []}
        self.steps: list[Measured] = []
        self.changes: list[Change] = []
        self._begun = time.perf_counter()
        self._labels: list[Label] = []
        self._current: Label | None = None
        self._since = 0.0
        self._moved: dict[Any, Label | None] = {}  # by the slot of the store

    def now(self) -> float:
        """Seconds since the record began."""
        return time.perf_counter() - self._begun

    @contextmanager
    def step(self) -> Iterator[None]:
        """While this lasts the run is in its next step."""
        begun = self.now()
        yield
        self.steps.append(Measured(None, begun, self.now()))

    def changes_in_steps(self) -> list[Change]:
        """What came and went up to the end of the last step; after it all goes."""
        end = self.steps[-1].end_seconds if self.steps else 0.0
        return [change for change in self.changes if change.seconds <= end]

    # -- what instrumented graphs and lanes call

    def number(self, label: Label) -> int:
        """A number for `label`, by which generated code names it."""
        self._labels.append(label)
        return len(self._labels) - 1

    def begin(self, label: int) -> None:
        """What `label` says begins."""
        self._current, self._since = self._labels[label], self.now()

    def end(self) -> None:
        """What began last ends. Transfers are only started here: their copies are the lanes' to tell."""
        label, self._current = self._current, None
        if label is not None and label.verb not in self.copies:
            self.compute.append(Measured(label, self._since, self.now()))

    def submitted(self, slot: Any) -> None:
        """A copy from or to `slot` is about to be given to a lane."""
        self._moved[slot] = self._current

    def timed(self, verb: Verb, copy: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """`copy`, of a lane for `verb`, measured."""

        def measured(slot: Any, memory: Any) -> None:
            label, begun = self._moved.get(slot), self.now()
            copy(slot, memory)
            self.copies[verb].append(Measured(label, begun, self.now()))

        return measured

    def changed(self, storage: int, nbytes: int) -> None:
        """A storage came to the device, or with `nbytes` below zero it went."""
        self.changes.append(Change(self.now(), storage, nbytes, self._current, len(self.steps)))
