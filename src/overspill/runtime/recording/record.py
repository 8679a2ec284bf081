"""The measured record of a run: ops, copies, waits and memory changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from overspill.core import OF_OPS, Graph, Stream, TensorKind, Verb
from overspill.plans.plan import Plan

SHORTEST_WAIT_SECONDS = 20e-6
"""An await shorter than this did not have to wait."""


class Label(NamedTuple):
    """The meaning of an instruction of a lowered graph."""

    graph: Graph
    verb: Verb | None
    """None for an input of the graph."""
    target: int
    """Number of an op or a tensor of `graph`, by `verb`; without a verb, of a tensor."""
    others: int = 0
    """Number of other ops that ran in the same call."""

    @property
    def is_op(self) -> bool:
        """Whether an op ran, not a transfer or an input."""
        return self.verb in (Verb.RUN, Verb.RECOMPUTE)

    @property
    def name(self) -> str:
        """The op's name with the number of others, or the tensor's name."""
        if self.verb not in OF_OPS:
            return self.graph.tensors[self.target].name
        return self.graph.ops[self.target].name + (f" and {self.others} others" if self.others else "")

    @property
    def cause(self) -> str:
        """For an await, the transfer that it waits for."""
        stream = Stream.OFFLOAD if self.verb is Verb.AWAIT_OFFLOAD else Stream.PREFETCH
        return f"{stream} of {self.name}"

    @property
    def text(self) -> str:
        """A one-line description."""
        if self.verb not in OF_OPS:
            return f"{self.name} | {self.verb or 'given'}"
        op = self.graph.ops[self.target]
        return f"{self.name} | {op.layer or '(outside layers)'} | {self.verb}, {op.phase}"


class Measured(NamedTuple):
    """A measured interval in seconds of the record."""

    label: Label | None
    """The instruction that ran; None for a step, or a move between two steps."""
    begin_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.end_seconds - self.begin_seconds

    @property
    def is_op(self) -> bool:
        """Whether an op ran."""
        return self.label is not None and self.label.is_op

    @property
    def is_wait(self) -> bool:
        """Whether compute waited for a transfer."""
        return not self.is_op and self.seconds >= SHORTEST_WAIT_SECONDS


class MemoryChange(NamedTuple):
    """A storage that came to the device or left it."""

    seconds: float
    storage: int
    """Key of the storage."""
    nbytes: int
    """Bytes of the storage; negative when it leaves."""
    label: Label | None
    """The instruction that ran; None outside planned graphs."""
    kind: TensorKind | None
    """Kind of the storage, if known."""
    step: int
    """Number of the step, from 0."""


class StepFacts(NamedTuple):
    """Facts about one step."""

    plans: bool
    """Whether plans were made in it."""
    prepared_seconds: float
    """Seconds spent on instrumenting its graphs."""
    is_whole: bool
    """Whether all of it is recorded."""


@dataclass
class RunRecord:
    """The measured times of one run, in seconds since its begin.

    The intervals of a list have the order of their ends.
    """

    compute: list[Measured] = field(default_factory=list)
    """Ops, and waits for transfers: on the device, or on the training thread of the CPU."""
    copies: dict[Verb, list[Measured]] = field(default_factory=lambda: {Verb.OFFLOAD: [], Verb.PREFETCH: []})
    """Copies of the lanes, by verb."""
    updates: list[Measured] = field(default_factory=list)
    """Updates on the host."""
    host: list[Measured] = field(default_factory=list)
    """When the host issued each instruction; only on CUDA."""
    steps: list[Measured] = field(default_factory=list)
    facts: list[StepFacts] = field(default_factory=list)
    """One for each step."""
    changes: list[MemoryChange] = field(default_factory=list)
    """Changes of memory, on the clock of compute."""
    plans: list[Plan] = field(default_factory=list)
    """The plans that ran."""
    on_device: bool = False
    """Whether it ran on CUDA, asynchronously to the host."""
    device_snapshot: dict[str, Any] | None = None
    """On CUDA, PyTorch's own memory snapshot, if requested."""
    is_full: bool = False
    """Whether the record was full before the run ended."""

    def time_changes(self, places: Sequence[int]) -> None:
        """Move each change from the host's time to that of compute.

        `places` are positions among the begins and ends of `compute`, one for each change.
        """
        latest = 0.0
        times = [at for thing in self.compute for at in (thing.begin_seconds, thing.end_seconds)]
        for number, place in enumerate(places):
            if 0 <= place < len(times):
                latest = max(latest, times[place])
            self.changes[number] = self.changes[number]._replace(seconds=latest)

    def changes_in_steps(self) -> list[MemoryChange]:
        """Return the memory changes up to the end of the last step."""
        return [change for change in self.changes if change.step < len(self.steps)]

    def live_bytes(self) -> Iterator[tuple[MemoryChange, int]]:
        """Yield each change up to the end of the last step, with the live bytes after it."""
        live = 0
        for change in self.changes_in_steps():
            live += change.nbytes
            yield change, live

    def peak_bytes(self, step: int | None = None) -> int:
        """Return the peak live bytes of all that was recorded, in one step or in all."""
        return max((live for change, live in self.live_bytes() if step in (None, change.step)), default=0)

    def within(self, things: list[Measured], step: int) -> list[Measured]:
        """Return those of `things` that began in this step."""
        _, begin, end = self.steps[step]
        return [thing for thing in things if begin <= thing.begin_seconds < end]
