"""An estimate: its JSON object, and its page of the verdict, memory over the step, its parts, and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from overspill.capture.recording.recording import Allocation
from overspill.core import Device, TensorKind
from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import format_bytes, format_seconds
from overspill.costs.precision import emulates
from overspill.estimation import Estimate
from overspill.estimation.figures import Figures
from overspill.estimation.peak import kind_of
from overspill.estimation.state_in_store import DiskShare, StateInStore
from overspill.estimation.unspecified import Unspecified
from overspill.plans.plan import Plan

from .advice import advice_answer, changes_table, ranked
from .page import Column, Figure, Mark, Ops, Page, PasteLine, Step, StepRun, Table, Tensors, Unit, Verdict, Words
from .page.columns import columns_of, frames_of, shape_of

MOST_LAYERS, SHOWN = 30, 5
OUTSIDE, OPTIMIZER = "(outside layers)", "(optimizer state)"
FAR = 3
"""A limit so many times above the peak gets no line in the picture, which would flatten everything below."""


def estimate_page(
    made: Estimate,
    title: str | None = None,
    *,
    asked: bool = True,
    within: Plan | InfeasibleBudgetError | None = None,
    stored: StateInStore | None = None,
    then: PasteLine | None = None,
) -> Page:
    """Return the page of an estimate.

    `asked` is whether the user named a device; the page has a verdict only then. `within` is the plan of the compiled
    step within a budget, or why no plan exists. `stored` is what each place takes with its state in a store. `then` is
    what to do next.
    """
    changes, too_little = ranked(made.changes if asked else ())
    return Page(
        title or f"{made.titled}{f' on {made.device.name}' if asked else ''}",
        estimate_verdict(made, tuple(_further(made, within, asked=asked)), asked=asked),
        (
            *([changes_table(changes)] if changes else []),
            *([] if stored is None else [_places(stored)]),
            lambda: (_step(made),),
            parts_table(made),
            _layers(made),
            _largest(made),
        ),
        (
            *([too_little] if too_little else []),
            "Everything is estimated by running the job on a GPU that is not there; nothing was measured.",
            *([] if made.parallel is None else [_shares(made.parallel.kind)]),
            *([open_settings(made.unspecified)] if made.unspecified and made.unspecified.moves else []),
        ),
        (then or PasteLine("overspill.advise(...)", "What would make it fit, for the arguments of this estimate:"),)
        if then or (asked and not made.fits())
        else (),
    )


def _shares(kind: str) -> str:
    """Return which of several GPUs the batch and the bytes are of."""
    if kind == "pp":
        return "The batch is of all GPUs, bytes are of the one that needs most."
    return "Batch and bytes are of each GPU."


def estimate_verdict(made: Estimate, further: tuple[Figure, ...] = (), *, asked: bool = True) -> Verdict:
    """Return whether the job fits, with the bytes behind that."""
    total, device = made.total, made.device
    figures = (
        Figure("takes", format_bytes(made.total_bytes),
            f"nine of ten times {format_bytes(total.low)} to {format_bytes(total.high)}, as {_uncertain(made)} turn "
            "out"),
        Figure("needs at least", format_bytes(made.minimum_capacity_bytes),
            "of the card, cache given back; a GPU, --max and budgets are compared with this"),
        Figure("tensors at the peak", format_bytes(made.peak_requested_bytes),
            f"allocated {format_bytes(made.peak_allocated_bytes)}"),
        Figure("reserved", format_bytes(made.peak_reserved_bytes), f"by the {made.allocator} allocator"),
        Figure("context", format_bytes(made.context_bytes)),
        *(emulation(device, {made.dtype for made in made.recording.allocations}) if asked else ()),
        *further,
    )  # fmt: skip
    if asked:
        return Verdict(estimate_sentence(made), made.fits(), figures)
    batch = "" if made.batch is None else f", batch {made.batch},"
    on = f"(context as on {device.name}; --gpu NAME asks for another)"
    return Verdict(f"{made.name}{batch} takes {format_bytes(made.total_bytes)} {on}", None, figures)


def _uncertain(made: Figures) -> str:
    """Return what the interval of an estimate allows for."""
    causes = ["library workspaces", "the context"]
    if made.retrace is not None and made.retrace.job.fine_tunes:
        causes += ["what loading the checkpoint leaves"]
        causes += [] if made.unspecified is None else ["settings that were not given"]
    return f"{', '.join(causes[:-1])} and {causes[-1]}"


def emulation(device: Device, dtypes: Iterable[str]) -> tuple[Figure, ...]:
    """Return that `device` computes one of these dtypes without units for it; nothing if it has them."""
    if not emulates(device, dtypes):
        return ()
    why = f"{device.name} has no units for it (compute capability {device.compute_capability}); --dtype amp has float16"
    return (Figure("bfloat16", "slow", why),)


def estimate_sentence(made: Figures) -> str:
    """Return whether it fits, in one line."""
    total, device, least = made.total_bytes, made.device, made.minimum_capacity_bytes
    batch = "" if made.batch is None else f", batch {made.batch},"
    has = f"the {format_bytes(device.memory_bytes)} of {device.name}"
    if not made.fits():
        short = format_bytes(least - device.memory_bytes)
        taken = format_bytes(total)
        more = (
            ""
            if taken == format_bytes(least)
            else f" (with memory to spare it takes {taken}, with what its allocator keeps)"
        )
        return f"Does not fit: {made.name}{batch} needs {format_bytes(least)}, {short} more than {has}{more}"
    # So near the limit, what is uncertain decides.
    tight = device.memory_bytes - least < made.total.high - made.total.central
    only_just = ", but only just" if tight else ""
    return (
        f"Fits{only_just}: {made.name}{batch} takes {format_bytes(total)} of {has} (it would survive on "
        f"{format_bytes(least)})"
    )


def _further(made: Estimate, within: Plan | InfeasibleBudgetError | None, *, asked: bool) -> Iterator[Figure]:
    """Yield the figures that only some jobs have, and those of other batches, GPUs and programs."""
    if made.recording.host_bytes:
        each = "" if made.parallel is None else " for each GPU"
        kept = format_bytes(made.recording.host_bytes)
        yield Figure("in the memory of the host", kept, f"of weights, gradients and optimizer state{each}")
    if made.stages and made.parallel is not None:
        yield _stages(made.stages, made.parallel.gpus)
    if asked and made.largest_batch is not None:
        more = " or more" if made.scaling is not None and made.largest_batch == made.scaling.most else ""
        yield Figure("largest batch", f"{made.largest_batch or 'none'}{more}", f"on {made.device.name}")
    if not asked:
        yield Figure("fits on", f"{len(made.gpus)} GPUs", ", ".join(made.gpus) or "none that `overspill devices` lists")
    if (compiled := made.compiled) is not None:
        fits = ("which fits, " if compiled.fits() else "which does not fit, ") if asked else ""
        program = f"{fits}by the program that Inductor writes for the CPU"
        yield Figure("with torch.compile", format_bytes(compiled.total_bytes), program)
    if isinstance(within, InfeasibleBudgetError):
        floor = f"infeasible, the floor is {format_bytes(within.floor_bytes)} ({within.cause})"
        yield Figure("  within a budget", format_bytes(within.budget_bytes), f"of tensors: {floor}")
    elif within is not None:
        peak, unmanaged = format_bytes(within.peak_bytes), format_bytes(within.unmanaged_peak_bytes)
        feasible = (
            f"feasible at {peak} (unmanaged: {unmanaged}), simulated step {within.slowdown:.2f} times the unmanaged one"
        )
        yield Figure("  within a budget", format_bytes(within.budget_bytes), f"of tensors: {feasible}")


def _places(stored: StateInStore) -> Table:
    """Return what each place takes with weights, gradients and optimizer state in a store."""
    loop, whole = stored.loop, stored.whole_step
    kept = f"; {format_bytes(stored.kept_bytes)} more can stay" if stored.kept_bytes else ""
    rows = [
        ("device", stored.device_bytes, f"activations stay, state comes for the ops that use it{kept}"),
        ("  at least", stored.least_device_bytes, "for the largest op or update alone"),
        ("host memory", stored.host_bytes, f"of {format_bytes(stored.state_bytes)} of state"),
    ]
    if loop.staying_bytes:
        rows.append(("disk", loop.disk_bytes, _on_disk(loop, stored)))
        fewer = f"; need not hold {format_bytes(stored.gradient_bytes)} of gradients"
        rows.append(("  with train_step", whole.disk_bytes, f"{_on_disk(whole, stored)}{fewer}"))
    return Table(
        "With weights, gradients and optimizer state in the store",
        (Column("where"), Column("bytes", Unit.BYTES), Column("what")),
        tuple(rows),
        "About so, without a plan; `overspill plan` says what a step takes, and how long.",
    )


def _on_disk(share: DiskShare, stored: StateInStore) -> str:
    """Return what a step writes to the disk and how long it is busy, and whether these are lower bounds."""
    written = f"{format_bytes(share.written_bytes)} written in each step, in {format_seconds(share.seconds)}"
    if not stored.is_bounded:
        return f"about; {written}"
    staying = f"{format_bytes(share.staying_bytes)} if activations stay on the device"
    return f"at least; {written}; {staying}" if share.disk_bytes else f"or more; {staying}"


def _stages(peaks: Mapping[int, int], count: int) -> Figure:
    """Return the pipeline stage that the figures describe, and other stages' requests; stages count from 1."""
    largest = max(peaks, key=lambda stage: peaks[stage])
    asked = ", ".join(f"stage {stage + 1} {format_bytes(nbytes)}" for stage, nbytes in peaks.items())
    between = "; those between take less than stage 2" if count > len(peaks) else ""
    return Figure("pipeline", f"stage {largest + 1} of {count}", f"needs most: of tensors {asked}{between}")


def open_settings(unspecified: Unspecified) -> str:
    """Return the settings that were not given, and how far they move the figure."""
    moved = ((unspecified.more, "more"), (unspecified.less, "less"))
    far = " or ".join(f"{format_bytes(nbytes)} {word}" for nbytes, word in moved if nbytes)
    return (
        f"Settings that were not given may make it {far}: give {', '.join(unspecified.options)}, or the contrary "
        "(--no-…), as your loop has it."
    )


def parts_table(made: Figures) -> Table:
    """Return the parts of the total at the peak, the largest first.

    Parts have the names that the views use.
    """
    total = made.total_bytes or 1
    parts = sorted(made.breakdown.items(), key=lambda part: -part[1])
    rows = [(name.replace("_", " "), _kind(name), nbytes, nbytes / total) for name, nbytes in parts if nbytes]
    return Table(
        "What it is made of at the peak",
        (
            Column("what"),
            Column("kind in the views", short="kind"),
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
    line = f" ({peak.source.removeprefix('backward of ')})" if peak.source else ""
    return f"The peak is in step {peak.iteration + 1}, {peak.phase.value}{where}, in {peak.op}{line}."


def _layers(made: Figures) -> Table:
    """Return the bytes of each layer at the peak.

    They match the views' tree of layers. A column counts the bytes that are neither weights nor buffers, as terminals
    print it.
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
    return Table("Layers that hold most at the peak", columns, rows, note, SHOWN)


def _home(it: Allocation) -> str:
    """Return the layer of an allocation: that of its maker, or of its parameter. All optimizer state has one layer."""
    if it.kind is TensorKind.OPTIMIZER_STATE:
        return OPTIMIZER
    if it.kind in (TensorKind.PARAMETER, TensorKind.BUFFER):
        return it.layer or it.name.rpartition(".")[0]
    return it.layer


def _largest(made: Figures) -> Table:
    """Return the largest allocations at the peak, with their source lines."""
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
    return Table("The largest tensors at the peak", columns, tuple(rows), first=SHOWN)


def _step(made: Figures) -> Step:
    """Return memory over the recorded step that has the peak, by event."""
    recording, demand, step = made.recording, made.demand, made.peak.iteration
    # Choose the step, and the allocations that are live in it.
    edges = (*recording.starts, recording.events) if recording.starts else (0, recording.events)
    first, last = edges[min(step, len(edges) - 2)], edges[min(step, len(edges) - 2) + 1]
    shown = np.flatnonzero((demand.start < last) & (demand.end > first) & (demand.nbytes > 0))
    allocations = [recording.allocations[position] for position in shown.tolist()]
    numbers = {position: number for number, position in enumerate(shown.tolist())}
    # Ops, tensors and layers are numbered again within the step.
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
    run = StepRun(
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
    # A line for the device's memory, if it is not far above the picture.
    limit = made.device.memory_bytes - made.outside_bytes
    marks = (Mark(f"{made.device.name} less its context", limit),) if limit < FAR * made.peak_requested_bytes else ()
    title, lines = f"Memory over step {step + 1}", frames_of(recording.frames)
    note = "Tensors and workspaces as they are requested; the context and what the allocator keeps come on top."
    words = Words(position="event")
    return Step(title, tuple(layers), tensors, recorded, (run,), marks, note, frames=lines, words=words)


def estimate_answer(
    request: dict[str, Any],
    made: Estimate,
    *,
    gpu: str | None,
    within: Plan | InfeasibleBudgetError | None,
    stored: StateInStore | None,
) -> dict[str, Any]:
    """Return the JSON object of an estimate.

    A figure that needs a named GPU is null without one.
    """
    peak = made.peak
    asked = gpu is not None
    return request | {
        # The bytes, and whether they fit.
        "gpu": gpu,
        "allocator": made.allocator,
        **_bytes_of(made),
        "unsaid": [] if made.unspecified is None else list(made.unspecified.options),
        "capacity_bytes": made.device.memory_bytes if asked else None,
        "fits": made.fits() if asked else None,
        "minimum_capacity_bytes": made.minimum_capacity_bytes,
        "breakdown": made.breakdown,
        "by_layer": dict(list(made.by_layer.items())[:20]),
        # When the peak is, and its largest tensors.
        "peak": {
            "step": peak.iteration, "phase": peak.phase.value, "layer": peak.layer, "op": peak.op,
            "around": list(peak.ops), "source": peak.source or None,
        },
        "peak_tensors": [_tensor_answer(made, position) for position in peak.largest],
        # Other batches, GPUs and changes.
        "host_bytes": made.recording.host_bytes,
        "in_store": None if stored is None else asdict(stored),
        "largest_batch": made.largest_batch if asked else None,
        "stages": [{"stage": stage + 1, "peak_requested_bytes": nbytes} for stage, nbytes in made.stages.items()],
        "fitting_gpus": list(made.gpus),
        "changes": [
            advice_answer(change) for change in (made.changes if asked else ())
        ],
        "compiled": None if made.compiled is None else _compiled_answer(made.compiled, within, asked=asked),
        "seconds": made.seconds,
    }  # fmt: skip


def _tensor_answer(made: Figures, position: int) -> dict[str, Any]:
    """Return the JSON object of an allocation at the peak."""
    recording = made.recording
    it = recording.allocations[position]
    op = recording.ops[it.op].name if 0 <= it.op < len(recording.ops) else None
    return {
        "name": it.name, "kind": it.kind.value, "layer": it.layer, "op": op, "shape": list(it.shape), "dtype": it.dtype,
        "size_bytes": int(made.demand.nbytes[position]), "source": recording.source(it.frame) or None,
    }  # fmt: skip


def _bytes_of(made: Figures) -> dict[str, int]:
    """Return the bytes that a job takes, for JSON, eager or compiled."""
    return {
        "peak_requested_bytes": made.peak_requested_bytes,
        "peak_allocated_bytes": made.peak_allocated_bytes,
        "peak_reserved_bytes": made.peak_reserved_bytes,
        "context_bytes": made.context_bytes,
        "total_bytes": made.total_bytes,
        "total_low_bytes": made.total.low,
        "total_high_bytes": made.total.high,
    }


def _compiled_answer(made: Figures, within: Plan | InfeasibleBudgetError | None, *, asked: bool) -> dict[str, Any]:
    """Return the JSON object of the job under torch.compile, also of its step within a budget."""
    return {
        "program": "cpu",
        **_bytes_of(made),
        "fits": made.fits() if asked else None,
        "minimum_capacity_bytes": made.minimum_capacity_bytes,
        "breakdown": made.breakdown,
        "within": None if within is None else _within_answer(within),
    }


def _within_answer(plan: Plan | InfeasibleBudgetError) -> dict[str, Any]:
    if isinstance(plan, InfeasibleBudgetError):
        return {
            "feasible": False, "budget_bytes": plan.budget_bytes, "floor_bytes": plan.floor_bytes, "cause": plan.cause,
            "peak_bytes": None, "unmanaged_peak_bytes": None, "step_seconds": None, "slowdown": None,
        }  # fmt: skip
    return {
        "feasible": True, "budget_bytes": plan.budget_bytes, "floor_bytes": None, "cause": None,
        "peak_bytes": plan.peak_bytes, "unmanaged_peak_bytes": plan.unmanaged_peak_bytes,
        "step_seconds": plan.step_seconds, "slowdown": plan.slowdown,
    }  # fmt: skip
