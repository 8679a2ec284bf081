"""What a run did when, as it was measured: ops, copies, waits, and every storage that came and went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from overspill.core import Graph, Stream, TensorKind, Verb
from overspill.plans.plan import Plan

SHORTEST_WAIT_SECONDS = 20e-6
"""An await that takes less found its transfer done."""


class Label(NamedTuple):
    """What an instruction of a lowered graph does: `target` is an op or a tensor of `graph`, by `verb`.

    Without a verb it is a tensor that the graph was given. An op that ran with others in one call has `others` of them.
    """

    graph: Graph
    verb: Verb | None
    target: int
    others: int = 0

    @property
    def is_op(self) -> bool:
        """Whether an op ran, rather than a tensor moved or was given."""
        return self.verb in (Verb.RUN, Verb.RECOMPUTE)

    @property
    def name(self) -> str:
        """The op that ran, with how many others, or the tensor."""
        if not self.is_op:
            return self.graph.tensors[self.target].name
        return self.graph.ops[self.target].name + (f" and {self.others} others" if self.others else "")

    @property
    def cause(self) -> str:
        """Of what awaits a transfer, for what it waits."""
        stream = Stream.OFFLOAD if self.verb is Verb.AWAIT_OFFLOAD else Stream.PREFETCH
        return f"{stream} of {self.name}"

    @property
    def text(self) -> str:
        """It in a line."""
        if not self.is_op:
            return f"{self.name} | {self.verb or 'given'}"
        op = self.graph.ops[self.target]
        return f"{self.name} | {op.layer or '(outside layers)'} | {self.verb}, {op.phase}"


class Measured(NamedTuple):
    """What ran from when to when, in seconds of the record; without a label it is a step, or a move between two steps."""

    label: Label | None
    begin_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.begin_seconds

    @property
    def is_op(self) -> bool:
        """Whether an op ran."""
        return self.label is not None and self.label.is_op

    @property
    def is_wait(self) -> bool:
        """Of what compute did: whether it stood still for a transfer."""
        return not self.is_op and self.seconds >= SHORTEST_WAIT_SECONDS


class Change(NamedTuple):
    """A storage of `nbytes` (below zero: it is gone) on the device, by its key, during what `label` says, in step `step`.

    Outside of planned graphs there is no label; where it is known what the storage is, it has its `kind`.
    """

    seconds: float
    storage: int
    nbytes: int
    label: Label | None
    kind: TensorKind | None
    step: int


class StepFacts(NamedTuple):
    """Of a step: whether plans were made in it, the seconds in which its graphs were made to tell what they do, and whether all of it is recorded."""

    plans: bool
    prepared_seconds: float
    is_whole: bool


@dataclass
class RunRecord:
    """The measured times of one run, in seconds since it was begun. Lists have things in the order in which they ended.

    `compute` is what the device did, ops and waits for transfers, and on the CPU the thread that trains. `copies` are those of
    the lanes, by verb. `host` is what the host issued when, where that is not compute itself: on CUDA. `changes` of memory
    are on the clock of compute. `plans` are those that ran.
    """

    compute: list[Measured] = field(default_factory=list)
    copies: dict[Verb, list[Measured]] = field(default_factory=lambda: {Verb.OFFLOAD: [], Verb.PREFETCH: []})
    host: list[Measured] = field(default_factory=list)
    steps: list[Measured] = field(default_factory=list)
    facts: list[StepFacts] = field(default_factory=list)
    """Of each of the steps."""
    changes: list[Change] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    on_device: bool = False
    """Whether it ran on CUDA, beside the host."""
    device_snapshot: dict[str, Any] | None = None
    """There, what PyTorch's own recorder saw of memory, if it was asked."""
    is_full: bool = False
    """Whether there was more than a record may hold; it has what came first."""

    def time_changes(self, places: Sequence[int]) -> None:
        """Give each change, of which the host said when it was, the time of compute: at `place` among its begins and ends."""
        latest = 0.0
        times = [at for thing in self.compute for at in (thing.begin_seconds, thing.end_seconds)]
        for number, place in enumerate(places):
            if 0 <= place < len(times):
                latest = max(latest, times[place])
            self.changes[number] = self.changes[number]._replace(seconds=latest)

    def changes_in_steps(self) -> list[Change]:
        """What came and went up to the end of the last step; after it all goes."""
        return [change for change in self.changes if change.step < len(self.steps)]

    def live_bytes(self) -> Iterator[tuple[Change, int]]:
        """Each change up to the end of the last step, with the bytes that are there behind it."""
        live = 0
        for change in self.changes_in_steps():
            live += change.nbytes
            yield change, live

    def peak_bytes(self, step: int | None = None) -> int:
        """The most bytes that were there at once, of all that was seen, in one step or in all."""
        return max((live for change, live in self.live_bytes() if step in (None, change.step)), default=0)

    def within(self, things: list[Measured], step: int) -> list[Measured]:
        """Those of `things` that began in a step."""
        _, begin, end = self.steps[step]
        return [thing for thing in things if begin <= thing.begin_seconds < end]
