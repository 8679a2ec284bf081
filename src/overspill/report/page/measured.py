"""Convert the last measured step of a run to linked views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from overspill.core import COPIES, Graph, Stream, Verb
from overspill.runtime.recording.record import Label, Measured, MemoryChange, RunRecord

from .columns import integers
from .sections import Integers, Ops, Step, StepRun, Tensors
from .step import STREAMS, VERBS, of_graph

OUTSIDE = "outside planned ops"
MOVED = "moved between steps"
_LANES = {Verb.OFFLOAD: STREAMS.index(Stream.OFFLOAD), Verb.PREFETCH: STREAMS.index(Stream.PREFETCH)}


def last_step(record: RunRecord) -> int:
    """Return the last step recorded in full, or the last step if none was."""
    whole = [step for step, facts in enumerate(record.facts) if facts.is_whole]
    return whole[-1] if whole else len(record.facts) - 1


def measured_step(record: RunRecord, title: str) -> Step:
    """Return the views of the last measured step, of all graphs that ran."""
    graphs = list({id(graph): graph for graph in _graphs_of(record, last_step(record))}.values())
    return with_measured(_joined([of_graph(graph, (), title) for graph in graphs], title), record, graphs)


def with_measured(section: Step, record: RunRecord, graphs: Sequence[Graph]) -> Step:
    """Return `section` with the last measured step as a further run.

    `section` has the tensors and ops of `graphs`, in this order.
    """
    views = _Views(section, record, graphs, last_step(record))
    found = views.run()
    return replace(section, tensors=_with_more(section.tensors, views.external_tensors), runs=(*section.runs, found))


def is_of(record: RunRecord, graph: Graph) -> bool:
    """Return whether only `graph` ran in the last step of `record`."""
    return bool(record.steps) and all(ran is graph for ran in _graphs_of(record, last_step(record)))


def _graphs_of(record: RunRecord, step: int) -> Iterator[Graph]:
    for things in (record.compute, *record.copies.values()):
        yield from (thing.label.graph for thing in record.within(things, step) if thing.label is not None)


class _Unplanned(NamedTuple):
    """A storage that belongs to no graph."""

    name: str
    kind: str
    nbytes: int


class _Views:
    """One measured step as columns.

    Each end of an op and each change of memory is an instant, and ends one position.
    """

    def __init__(self, section: Step, record: RunRecord, graphs: Sequence[Graph], step: int) -> None:
        self.external_tensors: list[_Unplanned] = []
        self._section = section
        self._record = record
        self._step = step
        self._begun = record.steps[step].begin_seconds
        self._seconds = record.steps[step].seconds
        sizes = [(len(graph.tensors), len(graph.ops)) for graph in graphs]
        firsts = [tuple(map(sum, zip(*sizes[:at], strict=True))) or (0, 0) for at in range(len(sizes))]
        self._firsts = {id(graph): first for graph, first in zip(graphs, firsts, strict=True)}
        self._made: Counter[tuple[int, int, int]] = Counter()

    def run(self) -> StepRun:
        """Return the measured step as a run."""
        record, step = self._record, self._step
        compute = record.within(record.compute, step)
        during = [c for c in record.changes if self._is_during(c)]
        # Positions end with ops and with changes of memory.
        ends = sorted([self._at(done.end_seconds) for done in compute] + [self._at(c.seconds) for c in during])
        start, end, tensor, nbytes = self._spans(ends)
        # Streams: ops, copies, and waits of compute.
        events = list(self._events(compute))
        begun = np.array([begin for *_, begin, _ in events], dtype=np.float64)
        waits = [done for done in compute if done.is_wait]
        return StepRun(
            name=f"measured (step {step + 1})",
            seconds=np.array([*ends, self._seconds], dtype=np.float64),
            positions=len(ends) + 1,
            start=integers(start),
            end=integers(end),
            tensor=integers(tensor),
            nbytes=integers(nbytes),
            offset=integers(()),
            streams=tuple(
                s.value for s in (Stream.COMPUTE, *COPIES, *([Stream.HOST_UPDATE] if record.updates else []))
            ),
            verbs=tuple(verb.value for verb in VERBS),
            stream=integers(stream for stream, *_ in events),
            verb=integers(verb for _, verb, *_ in events),
            target=integers(target for _, _, target, *_ in events),
            begun=begun,
            ended=np.array([ended for *_, ended in events], dtype=np.float64),
            event_at=np.searchsorted(np.array(ends), begun, side="right").astype(np.int64),
            stall_begun=np.array([self._at(wait.begin_seconds) for wait in waits]),
            stall_ended=np.array([self._at(wait.end_seconds) for wait in waits]),
            stall_cause=[wait.label.cause for wait in waits if wait.label is not None],
            measured=True,
        )

    def _at(self, seconds: float) -> float:
        """Return the seconds from the start of the step to a time of the record."""
        return min(max(0.0, seconds - self._begun), self._seconds)

    def _is_during(self, change: MemoryChange) -> bool:
        """Return whether a change is in the step, not before it."""
        return change.step == self._step and change.seconds >= self._begun

    def _spans(self, ends: Sequence[float]) -> list[list[int]]:
        """Return the columns start, end, tensor and bytes of all storages; starts and ends are positions."""
        live: dict[int, list[int]] = {}
        found: list[list[int]] = []
        # Follow the changes in order, each at the position of its instant.
        where = 0
        for change in self._record.changes:
            if change.step > self._step:
                break
            if self._is_during(change):
                while ends[where] < self._at(change.seconds):
                    where += 1
                where += 1  # this instant is the change's own
            if change.nbytes > 0:
                live[change.storage] = [where, len(ends) + 1, self._tensor(change), change.nbytes]
                found.append(live[change.storage])
            elif (span := live.pop(change.storage, None)) is not None:
                span[1] = where
        # Leave out storages that were there at no position of the step.
        kept = [span for span in found if span[0] < span[1]]
        return [list(column) for column in zip(*kept, strict=True)] or [[], [], [], []]

    def _tensor(self, change: MemoryChange) -> int:
        """Return the tensor of a storage, or the workspace of an op if the storage is one."""
        label = change.label
        if label is None or id(label.graph) not in self._firsts:
            kind = "other" if change.kind is None else change.kind.value
            return self._unplanned(_Unplanned(f"{kind.replace('_', ' ')}, {OUTSIDE}", kind, change.nbytes))
        first_tensor, first_op = self._firsts[id(label.graph)]
        if not label.is_op:
            return first_tensor + label.target
        writes = [t for t in label.graph.ops[label.target].writes if label.graph.tensors[t].nbytes == change.nbytes]
        if not writes:
            return -1 - (first_op + label.target)
        key = id(label.graph), label.target, change.nbytes  # outputs of one size come in their order
        place, self._made[key] = self._made[key], self._made[key] + 1
        return first_tensor + writes[place % len(writes)]

    def _unplanned(self, unplanned: _Unplanned) -> int:
        self.external_tensors.append(unplanned)
        return len(self._section.tensors.name) + len(self.external_tensors) - 1

    def _events(self, compute: Sequence[Measured]) -> Iterator[tuple[int, int, int, float, float]]:
        """Yield the stream, verb, target, begin and end of each op and copy."""
        for done in compute:
            if not done.is_op or (label := done.label) is None or label.verb is None:
                continue
            op = self._firsts[id(label.graph)][1] + label.target
            yield 0, VERBS.index(label.verb), op, self._at(done.begin_seconds), self._at(done.end_seconds)
        for verb, copies in self._record.copies.items():
            for copy in self._record.within(copies, self._step):
                times = self._at(copy.begin_seconds), self._at(copy.end_seconds)
                yield _LANES[verb], VERBS.index(verb), self._moved(copy.label), *times
        for update in self._record.within(self._record.updates, self._step):
            if (label := update.label) is not None and id(label.graph) in self._firsts:
                op = self._firsts[id(label.graph)][1] + label.target
                times = self._at(update.begin_seconds), self._at(update.end_seconds)
                yield 1 + len(COPIES), VERBS.index(Verb.RUN_ON_HOST), op, *times

    def _moved(self, label: Label | None) -> int:
        if label is None or id(label.graph) not in self._firsts:
            return self._unplanned(_Unplanned(MOVED, "other", 0))
        return self._firsts[id(label.graph)][0] + label.target


def _with_more(tensors: Tensors, external_tensors: Sequence[_Unplanned]) -> Tensors:
    """Return `tensors`, followed by those that belong to no graph."""
    none = np.full(len(external_tensors), -1, dtype=np.int64)
    return Tensors(
        name=[*tensors.name, *(s.name for s in external_tensors)],
        kind=[*tensors.kind, *(s.kind for s in external_tensors)],
        shape=[*tensors.shape, *("" for _ in external_tensors)],
        nbytes=np.concatenate([tensors.nbytes, integers(s.nbytes for s in external_tensors)]),
        maker=np.concatenate([tensors.maker, none]),
        layer=np.concatenate([tensors.layer, none]),
    )


def _joined(steps: Sequence[Step], title: str) -> Step:
    """Return the tensors and ops of several steps, as of one step."""
    if len(steps) == 1:
        return steps[0]
    # Layers of the same name become one.
    layers = tuple(dict.fromkeys(layer for step in steps for layer in step.layers))
    number = {layer: at for at, layer in enumerate(layers)}

    def layers_of(step: Step, column: Integers) -> Integers:
        return integers(number[step.layers[at]] if at >= 0 else -1 for at in column)

    # Numbers of ops and tensors are shifted by those of the steps before.
    ops = [len(step.ops.name) for step in steps]
    first_ops, first_tensors = np.cumsum([0, *ops]), np.cumsum([0, *(len(step.tensors.name) for step in steps)])
    tensors = Tensors(
        name=[name for step in steps for name in step.tensors.name],
        kind=[kind for step in steps for kind in step.tensors.kind],
        shape=[shape for step in steps for shape in step.tensors.shape],
        nbytes=np.concatenate([step.tensors.nbytes for step in steps]),
        maker=np.concatenate(
            [np.where(s.tensors.maker < 0, -1, s.tensors.maker + at) for s, at in zip(steps, first_ops, strict=False)]
        ),
        layer=np.concatenate([layers_of(step, step.tensors.layer) for step in steps]),
    )  # fmt: skip
    first_read, read = _rows([s.ops.first_read for s in steps], [s.ops.read for s in steps], first_tensors)
    first_written, written = _rows([s.ops.first_written for s in steps], [s.ops.written for s in steps], first_tensors)
    joined = Ops(
        name=[name for step in steps for name in step.ops.name],
        phase=[phase for step in steps for phase in step.ops.phase],
        layer=np.concatenate([layers_of(step, step.ops.layer) for step in steps]),
        flops=np.concatenate([step.ops.flops for step in steps]),
        first_read=first_read,
        read=read,
        first_written=first_written,
        written=written,
    )
    return Step(title, layers, tensors, joined, ())


def _rows(firsts: Sequence[Integers], rows: Sequence[Integers], offsets: Integers) -> tuple[Integers, Integers]:
    """Return rows of tensors of several graphs as columns of one: where each row begins, and all of them."""
    lengths = np.concatenate([np.diff(first) for first in firsts])
    found = np.concatenate([row + at for row, at in zip(rows, offsets, strict=False)])
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), found.astype(np.int64)
