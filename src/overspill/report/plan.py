"""A plan in a terminal: its memory, cost, and peak."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from overspill.capture.compiled.whole_step import NORM
from overspill.core import OF_OPS, Graph, Instruction, Tensor, TensorKind, Timeline, Verb
from overspill.core.units import format_bytes, format_seconds
from overspill.placement.place import Placed
from overspill.plans.plan import Plan
from overspill.policies import POLICIES, policy_named
from overspill.runtime.transfer.stores import store_bytes
from overspill.simulate import check

from .listing import count, format_flops, percent
from .tables import Column, Table, Unit, printed

SHOWN_TENSORS = 5


@dataclass(frozen=True)
class PlannedPeak:
    """The memory peak: its instruction, bytes by kind, and largest tensors.

    Bytes that belong to no tensor, an op's scratch space, count as workspace.
    """

    at: str
    by_kind: dict[TensorKind, int]
    largest: tuple[Tensor, ...]


def peak_of(plan: Plan) -> PlannedPeak:
    """The peak of `plan`, from checking its schedule again."""
    result = check(plan.graph, plan.schedule)
    at = result.peak_instruction
    instruction = plan.schedule.instructions[at] if at >= 0 else None
    live = [plan.graph.tensors[t] for t in {*result.live_at_peak, *made_by(plan.graph, instruction)}]
    by_kind = Counter[TensorKind]()
    for tensor in live:
        by_kind[tensor.kind] += tensor.nbytes
    # Bytes of no tensor are the workspace of an op.
    by_kind[TensorKind.WORKSPACE] += result.peak_bytes - by_kind.total()
    start = result.peak_instruction < 0
    return PlannedPeak(
        at="the start of the step"
        if start
        else _spell(plan.graph, plan.schedule.instructions[result.peak_instruction]),
        by_kind={kind: nbytes for kind, nbytes in by_kind.most_common() if nbytes},
        largest=tuple(sorted(live, key=lambda t: t.nbytes, reverse=True)[:SHOWN_TENSORS]),
    )


def peak_rows(graph: Graph, peak: PlannedPeak) -> list[dict[str, Any]]:
    """The largest tensors at the peak, for JSON."""
    return [
        {"name": t.name, "kind": t.kind.value, "size_bytes": t.nbytes, "source": graph.source(graph.producer.get(t.id)) or None}
        for t in peak.largest
    ]  # fmt: skip


def made_by(graph: Graph, instruction: Instruction | None) -> tuple[int, ...]:
    """The tensors that the op of `instruction` writes, if any."""
    if instruction is None or instruction.verb not in OF_OPS:
        return ()
    op = graph.ops[instruction.target]
    return op.recompute_writes if instruction.verb is Verb.RECOMPUTE else op.writes


def stored_by_kind(plan: Plan) -> dict[TensorKind, int]:
    """Bytes of persistent tensors that are stored between two steps.

    By kind, the largest first.
    """
    found = Counter[TensorKind]()
    for tensor in map(plan.graph.tensors.__getitem__, plan.schedule.stored):
        found[tensor.kind] += tensor.nbytes
    return dict(found.most_common())


def step_notes(plan: Plan) -> list[str]:
    """Notes for readers of a plan on what may move in its step.

    Of a whole step they say what is in the store between steps, and which updates wait for a gradient norm; else whether
    the policy's paper moves more than feature maps.
    """
    if not plan.graph.whole_step:
        name = plan.schedule.policy.partition(":")[0]
        note = policy_named(name).note_on(plan.graph) if name in POLICIES else None
        return [f"{name} {note}."] if note else []
    stored = stored_by_kind(plan)
    parts = ", ".join(f"{_plural(kind)} {format_bytes(nbytes)}" for kind, nbytes in stored.items())
    notes = [f"between steps the store has {parts}" if stored else "between steps all is on the device"]
    normed = {t for op in plan.graph.ops if op.name == NORM for t in op.reads}
    if normed:
        held = sum(plan.graph.tensors[t].nbytes for t in normed)
        notes.append(
            f"clipping by norm: every update waits for the gradients of all parameters, which takes {format_bytes(held)} "
            "on the device or in the store; without it each gradient is freed after its update"
        )
    return notes


def _plural(kind: TensorKind) -> str:
    return "optimizer state" if kind is TensorKind.OPTIMIZER_STATE else f"{kind.value}s"


def plan_report(plan: Plan, peak: PlannedPeak, placed: Placed, title: str, note: str | None = None) -> RenderableType:
    """Tables and notes about `plan`; times are marked as simulated."""
    parts: list[RenderableType] = [
        Text(title),
        "",
        printed(figures_table(plan, placed)),
        "",
        printed(peak_table(plan, peak)),
        "",
        printed(_largest(plan.graph, peak)),
        "",
        Text(f"Times are simulated, not measured. {_verdict(plan)}"),
        *map(Text, step_notes(plan)),
    ]
    return Group(*parts, *([Text(note)] if note else []))


def figures_table(plan: Plan, placed: Placed | None = None) -> Table:
    """The figures of a plan, in words."""
    rows = [
        *memory_figures(plan, placed),
        (
            "offloaded each step",
            f"{format_bytes(plan.offloaded_bytes)} in {count(plan.schedule.counts[Verb.OFFLOAD], 'tensor')}",
        ),
        *([("  room in the store, host memory or disk", format_bytes(room))] if (room := store_bytes(plan)) else []),
        ("recomputed each step", f"{count(plan.recomputed_ops, 'op')}, {format_flops(plan.recomputed_flops)}"),
        # Simulated times, and the lower bound.
        ("simulated step", format_seconds(plan.step_seconds)),
        ("simulated step, unmanaged", format_seconds(plan.in_core_seconds)),
        ("simulated slowdown", f"{plan.slowdown:.3f}"),
        *([("simulated recomputing", format_seconds(plan.recomputing_seconds))] if plan.recomputed_ops else []),
        ("simulated waiting", waiting(plan.timeline)),
        *_communication(plan.timeline),
        *([("  longest", longest)] if (longest := longest_wait(plan.timeline)) else []),
        (
            "lower bound by relaxation",
            f"{format_seconds(plan.lower_bound_seconds)} (the plan takes {percent(plan.gap, 1)} more)",
        ),
        ("planning took", format_seconds(plan.plan_seconds)),
    ]
    return Table("All figures of the plan", (Column("figure"), Column("value", Unit.NUMBER)), tuple(rows))


def _communication(timeline: Timeline) -> list[tuple[str, str]]:
    """What collectives take, if there are any."""
    if not timeline.communication_seconds:
        return []
    exposed = format_seconds(timeline.exposed_communication_seconds)
    taken = format_seconds(timeline.communication_seconds)
    return [("simulated communication", f"{taken}, of which compute waits for {exposed}")]


def memory_figures(plan: Plan, placed: Placed | None = None) -> list[tuple[str, str]]:
    """The budget, and the memory of the planned and unmanaged steps.

    Live bytes, or of a GPU the card and what is in it.
    """
    budget, share = format_bytes(plan.asked_bytes), percent(plan.needed_bytes, plan.asked_bytes)
    planned = f"{format_bytes(plan.needed_bytes)} ({share} of the budget)"
    if plan.device_bytes is None or plan.reserved_bytes is None or plan.unmanaged_device_bytes is None:
        lies = "" if placed is None else f"{format_bytes(placed.peak_bytes)} ({100 * placed.fragmentation:.1f} % fragmentation)"  # fmt: skip
        return [
            ("budget, of live tensors", budget),
            ("planned peak, live tensors", planned),
            *([] if placed is None else [(f"  placed by {placed.placer}", lies)]),
            ("unmanaged peak, live tensors", format_bytes(plan.unmanaged_peak_bytes)),
        ]
    return [
        # A plan for a card of a GPU.
        ("budget, size of the card", budget),
        ("planned: the card that it needs", planned),
        ("  of it live tensors", format_bytes(plan.peak_bytes)),
        ("  reserved by PyTorch for them", format_bytes(plan.reserved_bytes)),
        ("  context", format_bytes(plan.device_bytes - plan.reserved_bytes)),
        ("unmanaged: what it takes of a card", format_bytes(plan.unmanaged_bytes)),
    ]


def waiting(timeline: Timeline) -> str:
    """How long compute waits, and for what."""
    whole = timeline.exposed_transfer_seconds
    others = {"the host": timeline.host_seconds, "collectives": timeline.exposed_communication_seconds}
    causes = {"transfers": max(0.0, whole - sum(others.values())), **others}
    waited = {cause: seconds for cause, seconds in causes.items() if seconds}
    if len(waited) < 2:
        return format_seconds(whole) + "".join(f" for {cause}" for cause in waited)
    parts = ", ".join(f"for {cause} {format_seconds(seconds)}" for cause, seconds in waited.items())
    return f"{format_seconds(whole)} ({parts})"


def longest_wait(timeline: Timeline) -> str:
    """The longest wait of compute, with its cause; empty without waits.

    Its seconds are those of all waits of that cause.
    """
    waited = timeline.wait_seconds
    cause = max(waited, key=lambda cause: waited[cause], default=None)
    return "" if cause is None else f"{format_seconds(waited[cause])} for {cause}"


def limits_of(plan: Plan) -> list[tuple[str, int]]:
    """The limits of a plan's live bytes: budget and allocator.

    For a card, also what the allocator takes for them.
    """
    if plan.device_bytes is None or plan.reserved_bytes is None:
        return [("budget", plan.budget_bytes)]
    return [("budget less the context", plan.most_live_bytes), ("reserved by PyTorch", plan.reserved_bytes)]


def peak_table(plan: Plan, peak: PlannedPeak) -> Table:
    """The bytes of the peak by kind."""
    columns = (
        Column("kind", short=f"the peak, at {peak.at}"),
        Column("size", Unit.BYTES, bar=True),
        Column("share", Unit.SHARE),
    )
    kinds = peak.by_kind.items()
    rows = tuple((kind.value.replace("_", " "), nbytes, nbytes / plan.peak_bytes) for kind, nbytes in kinds)
    return Table(f"What the peak is made of, at {peak.at}", columns, rows)


def _largest(graph: Graph, peak: PlannedPeak) -> Table:
    """A table of the largest tensors, with their source lines if known."""
    columns = (
        Column("largest at the peak"),
        Column("kind"),
        Column("shape"),
        Column("size", Unit.BYTES),
        Column("line"),
    )
    rows = [
        (_name(t), t.kind.value, "x".join(map(str, t.shape)), t.nbytes, graph.source(graph.producer.get(t.id)))
        for t in peak.largest
    ]
    known = None if any(row[-1] for row in rows) else -1
    return Table("", columns[:known], tuple(row[:known] for row in rows))


def _verdict(plan: Plan) -> str:
    if not plan.fits_device:
        return f"{too_small(plan)}."
    return f"The step fits, in {percent(plan.needed_bytes, plan.unmanaged_bytes)} of what it takes unmanaged."


def too_small(plan: Plan) -> str:
    """A sentence that the device is too small for `plan`.

    Its budget is a share of the step.
    """
    return f"The step does not fit {plan.device.name}: it takes {format_bytes(plan.needed_bytes)} of {format_bytes(plan.device.memory_bytes)}"


def _spell(graph: Graph, instruction: Instruction) -> str:
    """An instruction for a reader, as `mm_1 (model.fc, backward)`."""
    if instruction.verb not in OF_OPS:
        return f"{instruction.verb.value} of {_name(graph.tensors[instruction.target])}"
    op = graph.ops[instruction.target]
    again = ", recomputed" if instruction.verb is Verb.RECOMPUTE else ""
    return f"{op.name} ({op.layer + ', ' if op.layer else ''}{op.phase.value}{again})"


def _name(tensor: Tensor) -> str:
    return tensor.name or f"tensor {tensor.id}"
