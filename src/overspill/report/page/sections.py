"""The parts of a report: verdict, tables, charts and linked views.

Nothing here knows what a plan or an estimate is. Numbers stay numbers, and who shows them writes them in their unit:
so a reader can sort a table, and read exact bytes off a curve.
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
    """The first sentence of a report, with headline figures.

    `good`: whether it is what the reader hoped for; None where nothing is judged.
    """

    text: str
    good: bool | None
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Axis:
    """An axis's name and unit."""

    name: str
    unit: Unit = Unit.NUMBER


@dataclass(frozen=True)
class Curve:
    """Points joined by lines.

    `steps`: each value holds until the next x. `dashed`: of what is not the subject, as a bound.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    steps: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """A line across a chart at one value, as a budget.

    `at` is on the y axis unless `on_x`. Of a step it lies across the memory, and where addresses are bound by it too,
    across these.
    """

    name: str
    at: float
    on_x: bool = False
    on_addresses: bool = False


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
    """One of the things compared, as a policy.

    `good`: false for one that fails, as by not fitting.
    """

    name: str
    x: float
    y: float
    good: bool = True
    note: str = ""


@dataclass(frozen=True)
class Points:
    """A chart of named points, as policies by memory and time.

    Curves are of what bounds them.
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
    """Lines of Python that ran ops, with their callers.

    `file` is an index of `files`, `caller` the line that called this one, or -1. `backward` is 1 where what ran is the
    backward of what the line ran.
    """

    files: Sequence[str] = ()
    file: Integers = field(default_factory=_none)
    line: Integers = field(default_factory=_none)
    function: Sequence[str] = ()
    caller: Integers = field(default_factory=_none)
    backward: Integers = field(default_factory=_none)


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of a step, by number.

    `maker` is the op that first writes one, or -1; `layer` is an index of `Step.layers`. `frame` is the line of Python
    that made one, or -1; empty where all were made by the lines of their makers.
    """

    name: Sequence[str]
    kind: Sequence[str]
    shape: Sequence[str]
    nbytes: Integers
    maker: Integers
    layer: Integers
    frame: Integers = field(default_factory=_none)


@dataclass(frozen=True, eq=False)
class Ops:
    """The ops of a step, by number.

    Op i reads `read[first_read[i]:first_read[i + 1]]`, and so for what it writes. The lines of Python that ran it are
    `frame[first_frame[i]:first_frame[i + 1]]`; both are empty where none is known.
    """

    name: Sequence[str]
    phase: Sequence[str]
    layer: Integers
    flops: Integers
    first_read: Integers
    read: Integers
    first_written: Integers
    written: Integers
    first_frame: Integers = field(default_factory=_none)
    frame: Integers = field(default_factory=_none)


@dataclass(frozen=True, eq=False)
class StepRun:
    """One run of a step: memory and streams over time.

    As by a plan: what was on the device when, and what each stream did. Positions count its instructions, and
    `seconds[p]` is when the one at `p` had been carried out; empty where there is no clock. From `start[i]` until
    before `end[i]` the device holds tensor `tensor[i]`, or the workspace of op `-1 - tensor[i]` if that is negative, of
    `nbytes[i]`, at address `offset[i]` (empty: no addresses are known).

    Event i is of instruction `event_at[i]`, on stream `stream[i]` (an index of `streams`), and does `verb[i]` (an index of
    `verbs`) to `target[i]`: an op on the compute stream, the first one, a tensor on the others. A stall is a time in which
    the compute stream waits, with its cause. What was `measured` is never shown in one picture with what was simulated.
    """

    name: str
    seconds: Floats
    positions: int
    start: Integers
    end: Integers
    tensor: Integers
    nbytes: Integers
    offset: Integers
    streams: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    stream: Integers = field(default_factory=_none)
    verb: Integers = field(default_factory=_none)
    target: Integers = field(default_factory=_none)
    begun: Floats = field(default_factory=lambda: np.zeros(0))
    ended: Floats = field(default_factory=lambda: np.zeros(0))
    event_at: Integers = field(default_factory=_none)
    stall_begun: Floats = field(default_factory=lambda: np.zeros(0))
    stall_ended: Floats = field(default_factory=lambda: np.zeros(0))
    stall_cause: Sequence[str] = ()
    placer: str = ""
    reserved_bytes: int | None = None
    measured: bool = False
    marks: tuple[Mark, ...] = ()
    """Lines for this run alone."""


@dataclass(frozen=True)
class Words:
    """What the views call memory, tensors, places, positions and kinds."""

    memory: str = "Memory over the step"
    thing: str = "tensor"
    place: str = "on the device"
    position: str = "instruction"
    kind: str = "kind"


@dataclass(frozen=True, eq=False)
class Step:
    """Linked views of one step: memory, streams, addresses, layers.

    They are of one of `runs` at a time. The first run is shown first; the others are a click away, and their memory is
    a line beside it. What a run does not know, as streams or addresses, has no view. `marks` are lines for all runs, as
    the budget. `words`: for what is no step of a model.
    """

    title: str
    layers: tuple[str, ...]
    tensors: Tensors
    ops: Ops
    runs: tuple[StepRun, ...]
    marks: tuple[Mark, ...] = ()
    note: str = ""
    frames: Frames = field(default_factory=Frames)
    words: Words = Words()


Section = Table | Lines | Points | Step


@dataclass(frozen=True)
class Page:
    """The description of a result, which a page, a terminal and a notebook show."""

    title: str
    verdict: Verdict
    parts: tuple[Section | Callable[[], Sequence[Section]], ...]
    """Sections that only the page has, and that take a while to make, come from a function."""
    notes: tuple[str, ...] = ()
    """What a reader must know besides."""

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """All sections, with the views."""
        found = (part() if callable(part) else (part,) for part in self.parts)
        return tuple(section for sections in found for section in sections)

    @property
    def tables(self) -> list[Table]:
        """The tables that a terminal shows too."""
        return [part for part in self.parts if isinstance(part, Table)]
