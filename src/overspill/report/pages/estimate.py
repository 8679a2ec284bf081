"""An estimate as a page: verdict, memory, its parts, and advice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from overspill.capture.recording.recording import Allocation
from overspill.core import TensorKind
from overspill.core.units import format_bytes
from overspill.estimation import Estimate
from overspill.estimation.figures import Figures
from overspill.estimation.peak import kind_of
from overspill.estimation.text import line_of, open_settings, trained, verdict
from overspill.report.advice import changes_table
from overspill.report.page import (
    Column,
    Figure,
    Mark,
    Ops,
    Page,
    Run,
    Section,
    Step,
    Table,
    Tensors,
    Unit,
    Verdict,
    Words,
)
from overspill.report.page.step import columns_of, frames_of, shape_of

MOST_LAYERS = 30
OUTSIDE, OPTIMIZER = "(outside layers)", "(optimizer state)"
FAR = 3
"""A limit so many times above the peak is no line in the picture: it would press all else flat."""


def estimate_page(made: Estimate, title: str | None = None, *, asked: bool = True) -> Page:
    """The report of an estimate.

    `asked`: whether a device was named, so that there is a verdict to give.
    """
    sections: list[Section] = [_step(made), estimate_table(made), _largest(made), _layers(made)]
    if made.changes and asked:
        sections.insert(0, changes_table(made.changes))
    notes = [
        "Everything is estimated by running the job on a GPU that is not there; nothing was measured.",
        "Memory over the step counts tensors and workspaces as requested; context and what the allocator keeps come on top.",
        *(line.strip() for line in trained(made)),
        *([] if made.unspecified is None else [open_settings(made.unspecified)]),
    ]
    said = estimate_verdict(made, asked=asked)
    if asked and made.largest_batch is not None:  # found by tracing more batches, for which no notebook should wait
        largest = Figure(f"largest batch on {made.device.name}", str(made.largest_batch))
        said = replace(said, figures=(*said.figures, largest))
    batch = "" if made.batch is None else f", batch {made.batch}"
    return Page(title or f"{made.name}{batch} on {made.device.name}", said, tuple(sections), tuple(notes))  # fmt: skip


def estimate_verdict(made: Estimate, *, asked: bool = True) -> Verdict:
    """Whether the job fits, with the bytes behind that."""
    total, device = made.total, made.device
    figures = [
        Figure("takes", format_bytes(made.total_bytes), f"nine of ten times {format_bytes(total.low)} to {format_bytes(total.high)}"),
        Figure("needs at least", format_bytes(made.minimum_capacity_bytes), "what its allocator caches given back"),
        Figure("tensors at the peak", format_bytes(made.peak_requested_bytes), f"allocated {format_bytes(made.peak_allocated_bytes)}"),
        Figure("reserved", format_bytes(made.peak_reserved_bytes), f"by the {made.allocator} allocator"),
        Figure("context", format_bytes(made.context_bytes)),
    ]  # fmt: skip
    if not asked:
        text = f"{made.name} takes {format_bytes(made.total_bytes)} (context as on {device.name})"
        return Verdict(text, good=None, figures=tuple(figures))
    text = verdict(made)
    return Verdict(text[0].upper() + text[1:], made.fits(), tuple(figures))


def estimate_table(made: Figures) -> Table:
    """The parts of the total at the peak, the largest first.

    With the names that the views have for them.
    """
    total = made.total_bytes or 1
    parts = sorted(made.breakdown.items(), key=lambda part: -part[1])
    rows = [(name.replace("_", " "), _kind(name), nbytes, nbytes / total) for name, nbytes in parts if nbytes]
    return Table(
        "What it is made of at the peak",
        (
            Column("what"),
            Column("kind in the views"),
            Column("bytes", Unit.BYTES, bar=True),
            Column("share", Unit.SHARE),
        ),
        (*rows, ("total", "", made.total_bytes, made.total_bytes / total)),
        _moment(made),
    )


def _kind(category: str) -> str:
    kind = kind_of(category)
    return "" if kind is None else kind.value.replace("_", " ")


def _moment(made: Figures) -> str:
    peak = made.peak
    where = f" of {peak.layer}" if peak.layer else ""
    if not peak.op:
        return ""
    return f"The peak is in step {peak.iteration + 1}, {peak.phase.value}{where}, in {peak.op}{line_of(peak)}."


def _layers(made: Figures) -> Table:
    """The bytes of each layer at the peak.

    As the views' tree of layers; and what of it is no weight or buffer, as terminals print.
    """
    found = Counter[str]()
    for position in made.peak.live:
        found[_home(made.recording.allocations[position])] += int(made.demand.nbytes[position])
    rows = tuple(
        (home or OUTSIDE, nbytes, made.by_layer.get(home or OUTSIDE, 0))
        for home, nbytes in found.most_common(MOST_LAYERS)
    )
    columns = (
        Column("layer"),
        Column("bytes", Unit.BYTES, bar=True),
        Column("without weights and buffers", Unit.BYTES),
    )
    note = "Weights and buffers are in the layer that has them; of which layer optimizer state is, is not known."
    return Table("Layers that hold most at the peak", columns, rows, note)


def _home(it: Allocation) -> str:
    """The layer of an allocation: its maker's, or its parameter's. All optimizer state is together."""
    if it.kind is TensorKind.OPTIMIZER_STATE:
        return OPTIMIZER
    if it.kind in (TensorKind.PARAMETER, TensorKind.BUFFER):
        return it.layer or it.name.rpartition(".")[0]
    return it.layer


def _largest(made: Figures) -> Table:
    """The largest allocations at the peak, with their source lines."""
    recording = made.recording
    rows = []
    for position in made.peak.largest:
        it = recording.allocations[position]
        maker = recording.ops[it.op].name if 0 <= it.op < len(recording.ops) else ""
        rows.append((
            it.name or maker, it.kind.value.replace("_", " "), shape_of(it.shape, it.dtype), _home(it),
            recording.source(it.frame), int(made.demand.nbytes[position]),
        ))  # fmt: skip
    columns = (
        Column("tensor"), Column("kind"), Column("shape"), Column("layer"), Column("line"),
        Column("bytes", Unit.BYTES, bar=True),
    )  # fmt: skip
    return Table("The largest tensors at the peak", columns, tuple(rows))


def _step(made: Figures) -> Step:
    """Memory over the recorded step that has the peak, by event."""
    recording, demand, step = made.recording, made.demand, made.peak.iteration
    # Choose the step, and the allocations that are live in it.
    edges = (*recording.starts, recording.events) if recording.starts else (0, recording.events)
    first, last = edges[min(step, len(edges) - 2)], edges[min(step, len(edges) - 2) + 1]
    shown = np.flatnonzero((demand.start < last) & (demand.end > first) & (demand.nbytes > 0))
    allocations = [recording.allocations[position] for position in shown.tolist()]
    numbers = {position: number for number, position in enumerate(shown.tolist())}
    # Ops, tensors and layers are numbered anew within the step.
    wanted = [number for number, op in enumerate(recording.ops) if op.iteration == step]
    op_numbers = {number: place for place, number in enumerate(wanted)}
    ops = [recording.ops[number] for number in wanted]
    layers = {name: i for i, name in enumerate(dict.fromkeys([*(op.layer for op in ops), *map(_home, allocations)]))}
    first_read, read = columns_of([[numbers[t] for t in op.reads if t in numbers] for op in ops])
    first_written, written = columns_of([[numbers[t] for t in op.writes if t in numbers] for op in ops])
    nbytes = demand.nbytes[shown].astype(np.int64)
    tensors = Tensors(
        name=[a.name or f"allocation {position}" for a, position in zip(allocations, shown.tolist(), strict=True)],
        kind=[a.kind.value for a in allocations],
        shape=[shape_of(a.shape, a.dtype) for a in allocations],
        nbytes=nbytes,
        maker=np.array([op_numbers.get(a.op, -1) for a in allocations], dtype=np.int64),
        layer=np.array([layers[_home(a)] for a in allocations], dtype=np.int64),
        frame=np.array([a.frame for a in allocations], dtype=np.int64),
    )
    # Memory by event, without a clock.
    run = Run(
        name="as estimated",
        seconds=np.zeros(0),
        positions=last - first,
        start=np.maximum(demand.start[shown] - first, 0).astype(np.int64),
        end=np.minimum(demand.end[shown] - first, last - first).astype(np.int64),
        tensor=np.arange(len(shown), dtype=np.int64),
        nbytes=nbytes,
        offset=np.zeros(0, dtype=np.int64),
    )
    names, phases = [op.name for op in ops], [op.phase.value for op in ops]
    home, flops = np.array([layers[op.layer] for op in ops], dtype=np.int64), np.zeros(len(ops), dtype=np.int64)
    first_frame, frame = columns_of([[op.frame] if op.frame >= 0 else [] for op in ops])
    recorded = Ops(names, phases, home, flops, first_read, read, first_written, written, first_frame, frame)
    # A line for the device's memory, if the picture has room for it.
    room = made.device.memory_bytes - made.outside_bytes
    marks = (Mark(f"{made.device.name} less its context", room),) if room < FAR * made.peak_requested_bytes else ()
    title, lines = f"Memory over step {step + 1}", frames_of(recording.frames)
    return Step(title, tuple(layers), tensors, recorded, (run,), marks, frames=lines, words=Words(position="event"))
