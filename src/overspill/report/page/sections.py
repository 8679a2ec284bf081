"""The parts of a report: verdict, tables, charts and linked views.

Nothing here depends on plans or estimates. Numbers stay numbers; each output writes them in their unit. So a reader can
sort a table, and read exact bytes off a curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from overspill.report.tables import Table, Unit

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A headline figure: label, formatted value, and small note."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The first sentence of a report, with headline figures."""

    text: str
    good: bool | None
    """Whether the result is the one that the reader wants; None where nothing is judged."""
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Axis:
    """An axis's name and unit."""

    name: str
    unit: Unit = Unit.NUMBER


@dataclass(frozen=True)
class Curve:
    """Points joined by lines."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    steps: bool = False
    """Whether each value holds until the next x."""
    dashed: bool = False
    """Whether it shows a reference, as a bound, and not the subject of the chart."""


@dataclass(frozen=True)
class Mark:
    """A line across a chart at one value, as a budget.

    In a view of a step it crosses the memory.
    """

    name: str
    at: float
    """The value, on the y axis unless `on_x`."""
    on_x: bool = False
    on_addresses: bool = False
    """Whether the line also bounds addresses, and so crosses their view too."""


@dataclass(frozen=True)
class Lines:
    """A chart of curves with common axes."""

    title: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Point:
    """One of the compared things, as a policy."""

    name: str
    x: float
    y: float
    good: bool = True
    """False for a failure, as for a policy that does not fit."""
    note: str = ""


@dataclass(frozen=True)
class Points:
    """A chart of named points, as policies by memory and time.

    Its curves show bounds on the points.
    """

    title: str
    x: Axis
    y: Axis
    points: tuple[Point, ...]
    curves: tuple[Curve, ...] = ()
    marks: tuple[Mark, ...] = ()
    note: str = ""


def _none() -> Integers:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Frames:
    """Lines of Python that ran ops, with their callers."""

    files: Sequence[str] = ()
    file: Integers = field(default_factory=_none)
    """An index of `files`."""
    line: Integers = field(default_factory=_none)
    function: Sequence[str] = ()
    caller: Integers = field(default_factory=_none)
    """The line that called this one, or -1."""
    backward: Integers = field(default_factory=_none)
    """1 where the op that ran is the backward of the op that the line ran."""


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of a step, by number."""

    name: Sequence[str]
    kind: Sequence[str]
    shape: Sequence[str]
    nbytes: Integers
    maker: Integers
    """The op that first writes the tensor, or -1."""
    layer: Integers
    """An index of `Step.layers`."""
    frame: Integers = field(default_factory=_none)
    """The line of Python that made the tensor, or -1; empty where the lines of all makers made them."""


@dataclass(frozen=True, eq=False)
class Ops:
    """The ops of a step, by number."""

    name: Sequence[str]
    phase: Sequence[str]
    layer: Integers
    flops: Integers
    first_read: Integers
    read: Integers
    """The tensors that ops read; op i reads `read[first_read[i]:first_read[i + 1]]`."""
    first_written: Integers
    written: Integers
    """The tensors that ops write, in the same form."""
    first_frame: Integers = field(default_factory=_none)
    """Where each op's lines begin in `frame`; empty where no line is known."""
    frame: Integers = field(default_factory=_none)
    """The lines of Python that ran op i, `frame[first_frame[i]:first_frame[i + 1]]`; empty where none is known."""


@dataclass(frozen=True, eq=False)
class StepRun:
    """One run of a step: memory and streams over time, as a plan simulates them.

    Positions count its instructions. From `start[i]` until before `end[i]` the device holds `nbytes[i]` bytes of
    `tensor[i]`. A stall is a time in which the compute stream waits, with its cause.
    """

    name: str
    seconds: Floats
    """`seconds[p]` is when the instruction at position p ends; empty without a clock."""
    positions: int
    start: Integers
    end: Integers
    tensor: Integers
    """A tensor, or the workspace of op `-1 - tensor[i]` if negative."""
    nbytes: Integers
    offset: Integers
    """The address of each row; empty where addresses are unknown."""
    streams: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    stream: Integers = field(default_factory=_none)
    """The stream of event i, as an index of `streams`."""
    verb: Integers = field(default_factory=_none)
    """The verb of event i, as an index of `verbs`."""
    target: Integers = field(default_factory=_none)
    """The target of event i: an op on the first stream, which computes; a tensor on the others."""
    begun: Floats = field(default_factory=lambda: np.zeros(0))
    ended: Floats = field(default_factory=lambda: np.zeros(0))
    event_at: Integers = field(default_factory=_none)
    """The instruction of event i."""
    stall_begun: Floats = field(default_factory=lambda: np.zeros(0))
    stall_ended: Floats = field(default_factory=lambda: np.zeros(0))
    stall_cause: Sequence[str] = ()
    placer: str = ""
    reserved_bytes: int | None = None
    measured: bool = False
    """Whether the run was measured; measured and simulated runs never share one picture."""
    marks: tuple[Mark, ...] = ()
    """Lines for this run alone."""


@dataclass(frozen=True)
class Words:
    """The words of the views for memory, tensors, places, positions and kinds."""

    memory: str = "Memory over the step"
    thing: str = "tensor"
    place: str = "on the device"
    position: str = "instruction"
    kind: str = "kind"


@dataclass(frozen=True, eq=False)
class Step:
    """Linked views of one step: memory, streams, addresses, layers.

    They show one of `runs` at a time, the first one at first; a click switches to another. The memory of the other runs
    is a line next to it. Data that a run lacks, as streams or addresses, has no view.
    """

    title: str
    layers: tuple[str, ...]
    tensors: Tensors
    ops: Ops
    runs: tuple[StepRun, ...]
    marks: tuple[Mark, ...] = ()
    """Lines for all runs, as the budget."""
    note: str = ""
    frames: Frames = field(default_factory=Frames)
    words: Words = Words()
    """Other words, for data that is no step of a model."""


Section = Table | Lines | Points | Step


@dataclass(frozen=True)
class PasteLine:
    """A line to paste, of a shell or of Python, and what it is for."""

    text: str
    why: str


@dataclass(frozen=True)
class Page:
    """The description of a result, which a page, a terminal and a notebook show."""

    title: str
    verdict: Verdict
    parts: tuple[Section | Callable[[], Sequence[Section]], ...]
    """Sections, or functions that make them: those take a while and only the page has them."""
    notes: tuple[str, ...] = ()
    """Further facts that a reader must know."""
    next: tuple[PasteLine, ...] = ()
    """What to do next."""

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """All sections, with the views."""
        found = (part() if callable(part) else (part,) for part in self.parts)
        return tuple(section for sections in found for section in sections)

    @property
    def tables(self) -> list[Table]:
        """The tables that a terminal shows too."""
        return [part for part in self.parts if isinstance(part, Table)]
