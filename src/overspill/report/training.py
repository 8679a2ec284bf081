"""A training run as a page: measured against planned, losses, steps, equality, and the views of the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import median

from overspill.core import TensorKind
from overspill.core.units import format_bytes, format_seconds
from overspill.devices.loader import calibrated_path
from overspill.job import Job
from overspill.placement.place import Placed, place_plan
from overspill.plans.plan import Plan
from overspill.runtime.options import Options
from overspill.runtime.reachable import same_bits
from overspill.runtime.training import Run

from .listing import count, format_flops, percent
from .page import Axis, Column, Curve, Figure, Lines, Mark, Page, Section, Step, Table, Unit, Verdict
from .page.measured import is_of, measured_step, with_measured
from .plan import in_python, plan_page, step_notes, stored_by_kind, timed_part
from .recording import views_title


@dataclass(frozen=True)
class Trained:
    """The result of a training run, with the request."""

    job: Job
    options: Options
    device: str
    managed: Run
    plan: Plan
    reference: Run | None = None
    """The same run without Overspill, if it ran."""

    def checked_against(self, reference: Run) -> Trained:
        """Return the same result with a reference run."""
        return replace(self, reference=reference)

    @cached_property
    def placed(self) -> Placed:
        """The addresses of the plan's blocks.

        The requested placement gives them, or PyTorch's caching allocator.
        """
        return place_plan(self.plan, self.options.placer)

    @cached_property
    def identical(self) -> bool | None:
        """Whether all numbers equal the reference's; None without one."""
        return None if self.reference is None else self.managed.identical_to(self.reference)

    @cached_property
    def differing_tensors(self) -> tuple[str, ...]:
        """Names of weights and buffers that differ from the reference's."""
        if self.reference is None or self.identical:
            return ()
        mine, other = self.managed.state, self.reference.state
        return tuple(
            name
            for name in {**mine, **other}
            if name not in mine or name not in other or not same_bits(mine[name], other[name])
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of persistent tensors that are stored between two steps."""
        return sum(stored_by_kind(self.plan).values())

    @property
    def difference(self) -> str:
        """The first difference between the run and its reference, in words."""
        if self.reference is None:
            return ""
        pairs = enumerate(zip(self.managed.losses, self.reference.losses, strict=True), start=1)
        parts = next(
            (f"the loss of step {i} is {a!r}, not {b!r}" for i, (a, b) in pairs if a != b), "the losses are equal"
        )
        names = self.differing_tensors
        some = f" ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})" if names else ""
        return f"{parts}, and {len(names)} of {len(self.managed.state)} tensors of weights and buffers differ{some}"


def training_page(trained: Trained, title: str | None = None) -> Page:
    """Return the page of a run: the views, the measurements, then the tables of the simulated plan."""
    record = trained.managed.record
    measured = ", but for those that say measured" if record is not None and record.steps else ""
    if trained.plan.device.kind == "cpu" and not trained.options.profile and not calibrated_path().is_file():
        measured += ", for a CPU that is not calibrated (`overspill calibrate` measures this one)"
    tensors = f"all {len(trained.managed.state)} tensors of weights and buffers"
    equal = f"identical: losses and {tensors} are equal to {_plain(trained)} to the last bit"
    of_plan = cache(lambda: _views(trained))
    verdict = _verdict(trained)
    return Page(
        title or title_of(trained),
        verdict,
        (
            lambda: [section for section in of_plan() if isinstance(section, Step)],
            peaks_table(trained),
            _loss_chart(trained),
            _time_chart(trained),
            lambda: [section for section in of_plan() if not isinstance(section, Step)],
        ),
        (
            f"each step {moved(trained)}",
            f"losses {' '.join(f'{loss:.6g}' for loss in trained.managed.losses)}",
            _times(trained),
            *([equal] if trained.identical else []),
            *_whole_step(trained),
            (
                "The peak, the losses and the times of steps were measured on this machine; the plan is "
                f"simulated{measured}."
            ),
        ),
        in_python(trained.plan, inductor=trained.options.backend == "inductor") if verdict.good else (),
    )


def _views(trained: Trained) -> list[Section]:
    """Return the views and tables of the plan, and the last step as measured where the run was recorded."""
    record, plan = trained.managed.record, trained.plan
    views, *tables = plan_page(plan, "", trained.options.placer).sections
    if record is None or not record.steps or not isinstance(views, Step):
        return [views, *tables]
    if is_of(record, plan.graph):
        return [with_measured(views, record, [plan.graph]), *tables]
    return [views, measured_step(record, views_title(record)), *tables]


def _verdict(trained: Trained) -> Verdict:
    run, plan = trained.managed, trained.plan
    good = run.measured_peak_bytes <= plan.asked_bytes and trained.identical is not False
    text = (
        f"Trained within {format_bytes(plan.asked_bytes)}"
        if good
        else f"Trained with {format_bytes(run.measured_peak_bytes)} of a budget of {format_bytes(plan.asked_bytes)}"
    )
    # Whether the numbers are the reference's.
    if trained.identical is not None:
        text += (
            ", with the same numbers to the last bit"
            if trained.identical
            else f", but with other numbers: {trained.difference}"
        )
    figures = (
        Figure("measured peak", format_bytes(run.measured_peak_bytes),
            f"{percent(run.measured_peak_bytes, plan.asked_bytes)} of the budget"),
        Figure("planned peak", format_bytes(run.planned_peak_bytes)),
        _unmanaged(trained),
        Figure("offloaded each step", format_bytes(run.offloaded_bytes), f"to the {trained.options.store} store"),
        *_disk(trained),
        Figure("usual step", format_seconds(usual_step_seconds(run)), f"measured, {usual_steps(run)}"),
        *_slowdown(trained),
    )  # fmt: skip
    return Verdict(text, good, figures)


def _disk(trained: Trained) -> list[Figure]:
    """Return what each step writes to the disk below host memory, and reads, if there is one."""
    plan = trained.plan
    if plan.tiers is None:
        return []
    host = format_bytes(plan.tiers.host_peak_bytes)
    of = f"of {format_bytes(plan.tiers.host_budget_bytes)}"
    if not plan.tiers.disk_bytes:
        return [Figure("host memory", host, of)]
    written = f"and {format_bytes(plan.disk_read_bytes)} read"
    return [
        Figure("host memory", host, f"{of}, {format_bytes(plan.tiers.disk_bytes)} on the disk"),
        Figure("written to the disk each step", format_bytes(plan.disk_written_bytes), written),
    ]


def _slowdown(trained: Trained) -> list[Figure]:
    """Return the step time relative to a run without Overspill, if measured."""
    if trained.reference is None or not (plain := usual_step_seconds(trained.reference)):
        return []
    ratio = usual_step_seconds(trained.managed) / plain
    return [Figure("slowdown", f"{ratio:.3f}", f"measured, {format_seconds(plain)} without Overspill")]


def _unmanaged(trained: Trained) -> Figure:
    """Return the peak without Overspill, measured or otherwise planned."""
    planned, reference = trained.plan.unmanaged_peak_bytes, trained.reference
    whole = planned if reference is None else reference.measured_peak_bytes
    share = f"the run took {percent(trained.managed.measured_peak_bytes, whole)} of it"
    note = f"planned, {share}" if reference is None else f"measured, {share}; planned {format_bytes(planned)}"
    return Figure("unmanaged peak", format_bytes(whole), note)


def _loss_chart(trained: Trained) -> Lines:
    curves = [_curve("with Overspill", trained.managed.losses)]
    if trained.reference is not None:
        curves.append(_curve("without", trained.reference.losses, dashed=True))
    return Lines("Losses", Axis("step"), Axis("loss"), tuple(curves))


def _time_chart(trained: Trained) -> Lines:
    curves = [_curve("with Overspill", trained.managed.step_seconds)]
    if trained.reference is not None:
        curves.append(_curve("without", trained.reference.step_seconds, dashed=True))
    note = "Measured on this machine. The first step captures, plans and compiles."
    if trained.managed.record is not None:
        note += " What each step did was recorded, which takes a little time."
    marks = (Mark("usual step", usual_step_seconds(trained.managed)),)
    return Lines("Time of each step", Axis("step"), Axis("step time", Unit.SECONDS), tuple(curves), marks, note)


def _curve(name: str, values: list[float], *, dashed: bool = False) -> Curve:
    return Curve(name, list(range(1, len(values) + 1)), values, dashed=dashed)


def title_of(trained: Trained) -> str:
    """Return a title: the trained model and the settings."""
    job, options = trained.job, trained.options
    return (
        f"{job.titled(whole_step=options.whole_step)}, {count(len(trained.managed.losses), 'step')} on "
        f"{trained.device}: policy {options.policy}, {options.store} store, {options.backend} backend"
    )


def peaks_table(trained: Trained) -> Table:
    """Return the budget and the peaks, planned and measured, with their shares."""
    run, plan = trained.managed, trained.plan
    whole = plan.unmanaged_bytes
    rows = [
        ("budget", plan.asked_bytes),
        ("planned peak", run.planned_peak_bytes),
        *_of_card(trained),
        ("measured peak", run.measured_peak_bytes),
        *([("measured peak, reserved", run.reserved_peak_bytes)] if run.reserved_peak_bytes is not None else []),
        ("unmanaged peak (planned)" if _partitioned_as_stock(run) else "unmanaged peak, so parted (planned)", whole),
    ]
    if trained.reference is not None:
        rows.append(("unmanaged peak (measured)", trained.reference.measured_peak_bytes))
    cells = tuple((what, n, n / plan.asked_bytes, n / whole if whole else None) for what, n in rows)
    shares = (Column("of the budget", Unit.SHARE), Column("of unmanaged", Unit.SHARE))
    return Table("Planned against measured", (Column(""), Column("size", Unit.BYTES, bar=True), *shares), cells)


def _of_card(trained: Trained) -> list[tuple[str, int]]:
    """Return the bytes of the plan's blocks at their addresses; on CUDA over the first steps, and with the context."""
    run = trained.managed
    if run.planned_reserved_bytes is None or run.planned_device_bytes is None:
        return [(f"planned peak, placed by {trained.placed.placer}", trained.placed.peak_bytes)]
    return [
        ("planned peak, allocated", trained.plan.allocated_bytes),
        ("planned peak, reserved by PyTorch", run.planned_reserved_bytes),
        ("planned peak, card with context", run.planned_device_bytes),
    ]


def moved(trained: Trained) -> str:
    """Return the tensors that a step offloaded and recomputed, in words."""
    plan = trained.plan
    again = (
        f"recomputed {count(plan.recomputed_ops, 'op')} ({format_flops(plan.recomputed_flops)})"
        if plan.recomputed_ops
        else "recomputed nothing"
    )
    return f"moved {format_bytes(trained.managed.offloaded_bytes)} to the {trained.options.store} store and {again}"


def _whole_step(trained: Trained) -> list[str]:
    """Return notes that apply to a plan of the whole step only."""
    notes = step_notes(trained.plan)
    parameters = trained.plan.graph.bytes_of(TensorKind.PARAMETER)
    if trained.plan.graph.whole_step and parameters > trained.plan.budget_bytes and not trained.plan.model_on_host:
        notes.append(
            "the budget holds from the first step on; before it the model, as it was built, had "
            f"{format_bytes(parameters)} "
            "on the device"
        )
    return notes


def _times(trained: Trained) -> str:
    """Return the usual step time, and the time of the first step."""
    part = "" if trained.plan.rounds == 1 else f" {timed_part(trained.plan)}"
    measured = (
        f"usual step {format_seconds(usual_step_seconds(trained.managed))} (simulated "
        f"{format_seconds(trained.plan.step_seconds)}{part})"
    )
    plain = f"; plain {format_seconds(usual_step_seconds(trained.reference))}" if trained.reference is not None else ""
    first = f"first step {format_seconds(trained.managed.step_seconds[0])}, on the {trained.options.backend} backend"
    return (
        f"{measured}{plain}; planning took {format_seconds(trained.plan.plan_seconds)}; "
        f"{first}{_partition(trained.managed)}"
    )


def _partitioned_as_stock(run: Run) -> bool:
    """Return whether forward and backward are partitioned as stock torch.compile does.

    A share given as a budget is a share of that step.
    """
    return run.partition in (None, 1.0)


def _partition(run: Run) -> str:
    """Return a note if forward and backward are partitioned otherwise than usual."""
    return "" if _partitioned_as_stock(run) else f", parted as by activation_memory_budget={run.partition:g}"


def usual_step_seconds(run: Run) -> float:
    """Return the median seconds of a step, without the first.

    All is compiled and planned by then. The second step may plan again, which hardly moves a median.
    """
    return median(run.step_seconds[1:] or run.step_seconds)


def usual_steps(run: Run) -> str:
    """Return the steps that the usual step time covers, in words."""
    count = len(run.step_seconds)
    if count == 1:
        return "the only step, with planning and compiling"
    if count == 2:
        return "the second step; the first plans and compiles"
    return "the median of the steps after the first, which plans and compiles"


def _plain(trained: Trained) -> str:
    return "plain PyTorch" if trained.options.backend == "eager" else "plain torch.compile"
