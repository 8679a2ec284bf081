"""A plan as a page: verdict, linked views, the step next to the unmanaged one, and its peak."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from overspill.capture.compiled.whole_step import NORM
from overspill.core import OF_OPS, Graph, Instruction, Tensor, TensorKind, Timeline, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.core.units import format_apart, format_bytes, format_seconds, size_between, size_enough
from overspill.placement.allocators.planned import CALLED, LIVE
from overspill.placement.place import Placed, place_plan
from overspill.plans.plan import Plan
from overspill.policies import POLICIES, policy_named, without_update
from overspill.policies.auto import Auto
from overspill.runtime.transfer.stores import store_bytes
from overspill.simulate import check

from .estimate import emulation
from .listing import count, format_flops, percent
from .page import Column, Figure, Page, PasteLine, Table, Unit, Verdict
from .page.step import reserved_by, step

SHOWN_TENSORS = 5

LIMITING = 0.9
"""The share of a step from which on the disk below the store limits it."""


def plan_page(
    plan: Plan,
    title: str | None = None,
    placer: str | None = None,
    placed: Placed | None = None,
    least_bytes: int | None = None,
    *,
    inductor: bool = False,
) -> Page:
    """Return the page of `plan`, with the lower bound of its time.

    `placer` gives its blocks their addresses (None: PyTorch's caching allocator). `placed` is the layout, if it is
    known. The rest is as in `brief_page`.
    """
    peak = peak_of(plan)
    parts = (
        lambda: (step(plan, placer),),
        _sides(plan, placer, placed),
        lambda: _swaps(plan),
        peak_table(plan, peak),
        _largest(plan.graph, peak),
    )
    return replace(brief_page(plan, title, least_bytes, inductor=inductor), parts=parts)


def brief_page(plan: Plan, title: str | None = None, least_bytes: int | None = None, *, inductor: bool = False) -> Page:
    """Return the page of `plan` without its views and tables.

    `least_bytes` are those without which there is no plan. `inductor` tells whose kernels run.
    """
    return Page(
        title or f"{plan.graph.name} on {plan.device.name}, policy {plan.schedule.policy}",
        plan_verdict(plan, least_bytes),
        (),
        ("Times and memory are simulated, not measured.", *pool_notes([plan.pool]), *step_notes(plan)),
        in_python(plan, inductor=inductor) if plan.fits_device and _is_needed(plan) else (),
    )


def _is_needed(plan: Plan) -> bool:
    """Return whether the step needs the plan to fit."""
    return plan.unmanaged_bytes > plan.asked_bytes or plan.is_managed


def in_python(plan: Plan, *, inductor: bool) -> tuple[PasteLine, ...]:
    """Return the lines of Python that train so."""
    size = size_between(plan.needed_bytes, plan.asked_bytes)
    policy, update = without_update(plan.schedule.policy)
    others = "" if policy == Auto.name else f', policy="{policy}"'
    others += f', update="{update}"' * bool(update) + ', backend="inductor"' * inductor
    if plan.tiers is not None and plan.tiers.disk_bytes:
        store = "host+disk" if plan.device.kind == "cpu" else "pinned+disk"
        host = size_between(plan.tiers.host_peak_bytes, plan.tiers.host_budget_bytes)
        others += f', store="{store}", host_budget="{host}"'
    if plan.model_on_host:
        others += ', device="cuda"'
    lines = [PasteLine(CALLED, "First of all, before CUDA is used:")] if plan.pool == LIVE else []
    if plan.graph.whole_step:
        if (count := plan.micro_batches * plan.rounds) > 1:
            others += f", accumulate={count}"
        step = f'step = overspill.train_step(model, loss_fn, optimizer, budget="{size}"{others})'
        return (*lines, PasteLine(step, "The body of your training loop; then call step(batch):"))
    trainer = f'callbacks=[overspill.callbacks.Budget("{size}"{others})]'
    lines.append(PasteLine(f'model = overspill.compile(model, budget="{size}"{others})', "Before your training loop:"))
    if not plan.model_on_host:  # Trainer has the model on the device before training begins
        lines.append(PasteLine(f"trainer = Trainer(..., {trainer})", "Or, with Trainer or TRL:"))
    return tuple(lines)


def plan_verdict(plan: Plan, least_bytes: int | None = None) -> Verdict:
    """Return the plan's memory and its cost, and the bytes without which there is no plan, if they are known."""
    # Where an allocator is the budget's, the unmanaged step is known by its live tensors alone.
    in_pool = plan.device_bytes is None and plan.reserved_bytes is not None
    live = "live tensors take " if in_pool else ""
    taken, unmanaged = format_bytes(plan.needed_bytes), f"{live}{format_bytes(plan.unmanaged_bytes)}"
    if plan.needed_bytes > plan.unmanaged_bytes and plan.device_bytes is not None:
        # A plan's card is the largest of several runs, with some to spare; an estimate is the likeliest.
        taken, unmanaged = f"{taken} at most", f"{unmanaged}, most likely"
    taken = f"takes {taken}; without a plan {unmanaged}"
    leave, total = plan.schedule.counts[Verb.OFFLOAD], f" of {format_bytes(plan.offloaded_bytes)}"
    moved = f"{count(leave, 'tensor')}{total if leave else ''} leave"
    least = [] if least_bytes is None else [
        Figure("minimum", f"at least {format_bytes(least_bytes)}", "--budget smallest plans for the least that works")
    ]  # fmt: skip
    again = [] if not plan.recomputed_ops else [
        Figure("recomputed", count(plan.recomputed_ops, "op"),
            f"{format_seconds(plan.recomputing_seconds)} of {_part(plan, 'a step')}")
    ]  # fmt: skip
    return Verdict(
        f"Fits in {format_bytes(plan.asked_bytes)}: {taken}" if plan.fits_device else too_small(plan),
        good=plan.fits_device,
        figures=(
            *least,
            Figure("slowdown", f"{plan.slowdown:.3f}",
                f"simulated: {format_seconds(plan.step_seconds)} {timed_part(plan)}, "
                f"{format_seconds(plan.in_core_seconds)} without a plan"),
            *store_figures(plan, f"{moved} the device in {_part(plan, 'each step')}"),
            *again,
            *emulation(plan.device, {tensor.dtype for tensor in plan.graph.tensors}),
        ),
    )  # fmt: skip


def timed_part(plan: Plan) -> str:
    """Return what the plan's step time is of, in words, as `a step`."""
    together = f" of {plan.micro_batches} micro-batches, layer by layer" if plan.micro_batches > 1 else ""
    if plan.rounds == 1:
        return f"a step{together}"
    return f"for the last of {plan.rounds} {f'rounds{together}' if together else 'micro-batches'}"


def _part(plan: Plan, usual: str) -> str:
    """Return what the plan is of, in words: `usual`, or a part of a step."""
    return usual if plan.rounds == 1 else f"this {'round' if plan.micro_batches > 1 else 'micro-batch'}"


def store_figures(plan: Plan, moved: str) -> list[Figure]:
    """Return what the store takes of host memory, and of a disk below it."""
    tiers = plan.tiers
    if tiers is None:
        return [Figure("host memory", format_bytes(store_bytes(plan)), moved)]
    read, written, busy = plan.disk_read_bytes, plan.disk_written_bytes, plan.timeline.disk_seconds
    figures = [
        Figure("host memory", format_bytes(tiers.host_peak_bytes),
            f"of {format_bytes(tiers.host_budget_bytes)}; {moved}"),
    ]  # fmt: skip
    if tiers.disk_bytes:
        figures.append(Figure("disk", format_bytes(tiers.disk_bytes),
            f"{_part(plan, 'each step')} writes {format_bytes(written)} and reads {format_bytes(read)}, in "
            f"{format_seconds(busy)}"))  # fmt: skip
    if written:
        least = "" if plan.rounds == 1 else "at least "
        figures.append(Figure("wear of the disk", f"{least}{format_bytes(1000 * written)}", "written in 1000 steps"))
    if busy > LIMITING * plan.step_seconds:
        figures.append(
            Figure(
                "limited by", "the disk",
                f"a faster one, a second one, or --host-budget {size_enough(store_bytes(plan))} for no disk at all",
            )
        )  # fmt: skip
    return figures


def _sides(plan: Plan, placer: str | None, placed: Placed | None) -> Table:
    """Return all figures of the plan, and those of the unmanaged step next to them."""
    columns = (Column(""), Column(f"plan ({plan.schedule.policy})"), Column("unmanaged"))
    return Table("Planned and unmanaged", columns, tuple(_rows(plan, placer, placed)))


def _rows(plan: Plan, placer: str | None, placed: Placed | None) -> Iterator[tuple[str, str, str]]:
    timeline, nothing, none = plan.timeline, format_bytes(0), format_seconds(0.0)
    yield "budget", format_bytes(plan.asked_bytes), ""
    # Memory: of a plan for a card of a GPU, the card and what is in it.
    if plan.device_bytes is not None and plan.reserved_bytes is not None:
        yield "card", format_bytes(plan.needed_bytes), format_bytes(plan.unmanaged_bytes)
        yield f"  {reserved_by(plan)}", format_bytes(plan.reserved_bytes), ""
        yield "  context", format_bytes(plan.device_bytes - plan.reserved_bytes), ""
    yield "live tensors at the peak", format_bytes(plan.peak_bytes), format_bytes(plan.unmanaged_peak_bytes)
    if plan.device_bytes is None:
        placed = placed or place_plan(plan, placer)
        reach = f"{format_bytes(placed.peak_bytes)} ({100 * placed.fragmentation:.1f} % fragmentation)"
        yield f"  placed by {placed.placer}", reach, ""
    moved = f"{format_bytes(plan.offloaded_bytes)} and {format_bytes(plan.prefetched_bytes)}"
    yield "to the store and back", moved, nothing
    if taken := store_bytes(plan):
        yield "  of host memory or disk", format_bytes(taken), ""
    if plan.tiers is not None:
        yield "  of host memory", format_bytes(plan.tiers.host_peak_bytes), ""
    if plan.tiers is not None and plan.tiers.disk_bytes:
        yield "  of the disk", format_bytes(plan.tiers.disk_bytes), ""
        written = f"{format_bytes(plan.disk_written_bytes)} and {format_bytes(plan.disk_read_bytes)}"
        yield "    written and read", written, ""
        least = f"{format_bytes(plan.tiers.least_moved_bytes)} in all"
        yield "    lower bound by relaxation", least, ""
    # Simulated times, and the lower bound.
    yield "simulated step", format_seconds(plan.step_seconds), format_seconds(plan.in_core_seconds)
    bound = f"{format_seconds(plan.lower_bound_seconds)} (the plan takes {percent(plan.gap, 1)} more)"
    yield "  lower bound by relaxation", bound, ""
    if plan.recomputed_ops:
        yield (
            "  recomputing",
            f"{format_seconds(plan.recomputing_seconds)}, {format_flops(plan.recomputed_flops)}",
            none,
        )
    yield "  waiting", waiting(timeline), waiting(plan.unmanaged_timeline)
    if longest := longest_wait(timeline):
        yield "    longest", longest, ""
    if timeline.communication_seconds:
        exposed = format_seconds(timeline.exposed_communication_seconds)
        yield (
            "  communication",
            f"{format_seconds(timeline.communication_seconds)}, of which compute waits for {exposed}",
            "",
        )
    yield "planning took", format_seconds(plan.plan_seconds), ""


def waiting(timeline: Timeline) -> str:
    """Return how long compute waits, and for what."""
    whole = timeline.exposed_transfer_seconds
    others = {"the host": timeline.host_seconds, "collectives": timeline.exposed_communication_seconds}
    causes = {"transfers": max(0.0, whole - sum(others.values())), **others}
    waited = {cause: seconds for cause, seconds in causes.items() if seconds}
    if len(waited) < 2:
        return format_seconds(whole) + "".join(f" for {cause}" for cause in waited)
    parts = ", ".join(f"for {cause} {format_seconds(seconds)}" for cause, seconds in waited.items())
    return f"{format_seconds(whole)} ({parts})"


def longest_wait(timeline: Timeline) -> str:
    """Return the longest wait of compute, with its cause; empty without waits.

    The seconds sum over all waits with that cause.
    """
    waited = timeline.wait_seconds
    cause = max(waited, key=lambda cause: waited[cause], default=None)
    return "" if cause is None else f"{format_seconds(waited[cause])} for {cause}"


def _swaps(plan: Plan) -> tuple[Table, ...]:
    """Return the table of offloaded tensors: when they leave and return, and the waits.

    The tuple is empty where nothing is offloaded.
    """
    graph, waited = plan.graph, defaultdict[str, float](float)
    for cause, seconds in plan.timeline.wait_seconds.items():
        waited[cause.partition(" of ")[2]] += seconds
    # When each tensor first leaves and comes back.
    starts: dict[Verb, dict[int, float]] = {Verb.OFFLOAD: {}, Verb.PREFETCH: {}}
    for event in plan.timeline.events:
        if event.verb in starts:
            starts[event.verb].setdefault(event.target, event.start_seconds)
    gone, back = starts.values()
    rows = [
        (tensor.name, tensor.nbytes, graph.source(graph.producer.get(tensor.id)), gone.get(tensor.id),
            back.get(tensor.id), waited[tensor.name])
        for tensor in (graph.tensors[t] for t in {**gone, **back})
    ]  # fmt: skip
    if not rows:
        return ()
    columns = (
        Column("tensor"), Column("bytes", Unit.BYTES, bar=True), Column("line"), Column("leaves at", Unit.SECONDS),
        Column("comes back from", Unit.SECONDS), Column("compute waits", Unit.SECONDS),
    )  # fmt: skip
    # Longest waits first.
    ranked = sorted(rows, key=lambda row: (-row[5], -row[1]))
    return (Table("What leaves the device, the longest waits first", columns, tuple(ranked)),)


def peak_table(plan: Plan, peak: PlannedPeak) -> Table:
    """Return the bytes of the peak by kind."""
    columns = (Column("kind"), Column("size", Unit.BYTES, bar=True), Column("share", Unit.SHARE))
    kinds = peak.by_kind.items()
    rows = tuple((kind.value.replace("_", " "), nbytes, nbytes / plan.peak_bytes) for kind, nbytes in kinds)
    return Table(f"What the peak is made of, at {peak.at}", columns, rows)


def _largest(graph: Graph, peak: PlannedPeak) -> Table:
    """Return a table of the largest tensors, with their source lines if known."""
    columns = (Column("tensor"), Column("kind"), Column("shape"), Column("size", Unit.BYTES), Column("line"))
    rows = [
        (_name(t), t.kind.value, "x".join(map(str, t.shape)), t.nbytes, graph.source(graph.producer.get(t.id)))
        for t in peak.largest
    ]
    known = None if any(row[-1] for row in rows) else -1
    return Table("The largest at the peak", columns[:known], tuple(row[:known] for row in rows))


def infeasible_page(error: InfeasibleBudgetError, title: str, spelled: Callable[[str], str] = str) -> Page:
    """Return the report where no plan exists.

    It shows the least memory that a plan needs, its parts, and what would help. `spelled` writes names of settings in
    the form that the user gives them.
    """
    budget, floor = format_apart(error.budget_bytes, error.floor_bytes)
    figures = [Figure("the least that works", floor, error.cause)]
    figures += [Figure(part.what, format_bytes(part.nbytes)) for part in error.parts]
    changes = [(spelled(change.what), change.nbytes) for change in error.changes]
    changes.append(("a card of that size" if error.parts else "a budget of that size", error.floor_bytes))
    ranked = tuple(sorted(changes, key=lambda change: change[1]))
    helps = Table(
        "What would help, the least first",
        (Column("change"), Column("needs then", Unit.BYTES, bar=True)),
        ranked,
        "A smaller batch takes less in any case.",
    )
    verdict = Verdict(f"Does not fit in {budget}", good=False, figures=tuple(figures))
    return Page(title, verdict, (helps,), tuple(f"{hint[0].upper()}{hint[1:]}." for hint in map(spelled, error.hints)))


@dataclass(frozen=True)
class PlannedPeak:
    """The memory peak: its instruction, bytes by kind, and largest tensors."""

    at: str
    by_kind: dict[TensorKind, int]
    """Bytes by kind; an op's scratch space belongs to no tensor and counts as workspace."""
    largest: tuple[Tensor, ...]


def peak_of(plan: Plan) -> PlannedPeak:
    """Return the peak of `plan`, by checking its schedule again."""
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
    """Return the largest tensors at the peak, for JSON."""
    return [
        {"name": t.name, "kind": t.kind.value, "size_bytes": t.nbytes,
            "source": graph.source(graph.producer.get(t.id)) or None}
        for t in peak.largest
    ]  # fmt: skip


def made_by(graph: Graph, instruction: Instruction | None) -> tuple[int, ...]:
    """Return the tensors that the op of `instruction` writes, if any."""
    if instruction is None or instruction.verb not in OF_OPS:
        return ()
    op = graph.ops[instruction.target]
    return op.recompute_writes if instruction.verb is Verb.RECOMPUTE else op.writes


def stored_by_kind(plan: Plan) -> dict[TensorKind, int]:
    """Return the bytes of persistent tensors in the store between two steps, by kind, the largest first."""
    found = Counter[TensorKind]()
    for tensor in map(plan.graph.tensors.__getitem__, plan.schedule.stored):
        found[tensor.kind] += tensor.nbytes
    return dict(found.most_common())


def step_notes(plan: Plan) -> list[str]:
    """Return notes for readers of a plan on the tensors that may move in its step.

    With unified memory nothing does. For a whole step they give what is in the store between steps, and the updates
    that wait for a gradient norm. Otherwise they say whether the policy's paper moves more than activations.
    """
    if plan.device.unified_memory:
        return [
            f"{plan.device.name} shares its memory with the host: moving tensors there frees nothing, so none moves."
        ]
    if not plan.graph.whole_step:
        name = plan.schedule.policy.partition(":")[0]
        note = policy_named(name).note_on(plan.graph) if name in POLICIES else None
        return [f"{name} {note}."] if note else []
    stored = stored_by_kind(plan)
    parts = ", ".join(f"{_plural(kind)} {format_bytes(nbytes)}" for kind, nbytes in stored.items())
    notes = [f"between steps the store has {parts}" if stored else "between steps all is on the device"]
    if plan.one_by_one:
        notes.append(f"micro-batches run one after another: {plan.one_by_one}")
    if plan.model_on_host:
        notes.append(
            "the model does not fit on the card, and begins on the CPU: "
            'device="cuda" brings each weight when the plan needs it'
        )
    normed = {t for op in plan.graph.ops if op.name == NORM for t in op.reads}
    if normed:
        held = sum(plan.graph.tensors[t].nbytes for t in normed)
        notes.append(
            "clipping by norm: every update waits for the gradients of all parameters, which takes "
            f"{format_bytes(held)} "
            "on the device or in the store; without it each gradient is freed after its update"
        )
    return notes


def _plural(kind: TensorKind) -> str:
    return "optimizer state" if kind is TensorKind.OPTIMIZER_STATE else f"{kind.value}s"


def pool_notes(pools: Iterable[str | None]) -> list[str]:
    """Return the note on how a job gets the pool that plans are for, if it is not the one that it has anyway."""
    if LIVE not in pools:
        return []
    start = f"overspill run --allocator {LIVE}"
    return [f"`{LIVE}` is {CALLED}: call it before CUDA is used, or start the job by `{start}`."]


def too_small(plan: Plan) -> str:
    """Return a sentence that the device is too small for `plan`, whose budget is a share of the step."""
    return (
        f"The step does not fit {plan.device.name}: it takes {format_bytes(plan.needed_bytes)} of "
        f"{format_bytes(plan.device.memory_bytes)}"
    )


def _spell(graph: Graph, instruction: Instruction) -> str:
    """Return an instruction for a reader, as `mm_1 (model.fc, backward)`."""
    if instruction.verb not in OF_OPS:
        return f"{instruction.verb.value} of {_name(graph.tensors[instruction.target])}"
    op = graph.ops[instruction.target]
    again = ", recomputed" if instruction.verb is Verb.RECOMPUTE else ""
    return f"{op.name} ({op.layer + ', ' if op.layer else ''}{op.phase.value}{again})"


def _name(tensor: Tensor) -> str:
    return tensor.name or f"tensor {tensor.id}"
