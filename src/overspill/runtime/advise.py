"""Advice on a job, including Overspill's own plans for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from overspill.core import Device, Verb
from overspill.core.errors import InfeasibleBudgetError, OverspillError
from overspill.core.forked import Forked, can_fork
from overspill.core.garbage import without_collection
from overspill.costs import op_seconds
from overspill.costs.scratch import Software
from overspill.estimation.advice import CALLBACK, COMPILED, Advice, Price, Vain, advice
from overspill.estimation.estimate import Estimate
from overspill.job import Job, Script
from overspill.job.source import Source
from overspill.placement.allocators.planned import CALLED, LIVE
from overspill.plans.fit import GAIN, NEAR
from overspill.plans.plan import Plan
from overspill.policies.auto import Auto
from overspill.policies.in_core import Liveness
from overspill.simulate import simulate

from .capture_job import captures_of
from .compiled.partitions import Partitioned
from .hardware import as_absent
from .options import Options
from .preview import JobStep, preview, step_of
from .transfer.stores import store_bytes

_TRAIN_STEP = "overspill.train_step(model, loss_fn, optimizer, budget=…)"
_ON_HOST = 'overspill.train_step(model, loss_fn, optimizer, update="auto", budget=…)'
_WORTH_UPDATES = 1.1
"""The slowdown from which updates on the host are tried too; they take as long to plan as all before."""
_SHARDED = f"{_TRAIN_STEP} of the model in fully_shard"


@dataclass(frozen=True)
class Unplanned:
    """What a job takes and costs without a plan, as its estimate has it, and the budget of a plan."""

    outside_bytes: int
    total_bytes: int
    step_seconds: float | None
    budget_bytes: int

    @classmethod
    def of(cls, made: Estimate) -> Unplanned:
        """Return what an estimate says."""
        return cls(made.outside_bytes, made.total_bytes, made.step_seconds(), made.budget_bytes)


Found = tuple[list[Advice], list[tuple[str, str]]]
"""Advice, and what was in vain, with the reason."""
Planning = Forked[Unplanned, Found]
"""Plans that are made beside the estimate that they need."""


def advise(
    estimate: Estimate,
    progress: Callable[[str], None] | None = None,
    vain: Vain | None = None,
    planning: Planning | None = None,
) -> Iterator[Advice]:
    """Yield the changes that would help the job of this estimate, each one tried, the cheapest first.

    `progress` gets a line about the present work. `vain` gets each change that does not help, and why. `planning` is
    under way if this process may be copied; otherwise plans are made here.
    """
    if estimate.retrace is None or not _can_plan(job := estimate.retrace.job):
        return advice(estimate, None, progress, vain=vain)

    tell: Vain = vain or (lambda *_: None)

    def planner() -> list[Advice]:
        unplanned = Unplanned.of(estimate)
        beside = None if planning is None else planning.result(unplanned)
        found, left_out = beside or _planned(job, estimate.device, estimate.software, lambda: unplanned)
        for change in left_out:
            tell(*change)
        return found

    return advice(estimate, planner, progress, vain=vain)


@contextmanager
def planning(job: Job, device: Device, software: Software) -> Iterator[Planning | None]:
    """Yield the planning of a job in a copy of this process, for `advise`; None if it cannot be.

    Enter it before anything runs: threads are not copied.
    """
    if isinstance(job.model, (Script, Source)) or not (can_fork() and _can_plan(job)):
        yield None
        return

    def planned(ask: Callable[[], Unplanned]) -> Iterator[Found]:
        yield _planned(job, device, software, ask)

    with Forked(planned) as under_way:
        yield under_way


@dataclass(frozen=True)
class JobOnGpu:
    """A GPU for a job. What is not known is None."""

    gpu: str
    capacity_bytes: int
    minimum_capacity_bytes: int
    """What the job needs there without a plan."""
    fits: bool
    fits_planned: bool | None
    """Whether a plan may fit: it surely does not if the least of any plan exceeds the memory."""
    step_seconds: float | None
    """Simulated seconds of a step without a plan, by the kernels of the first GPU."""
    largest_batch: int | None
    """About the largest batch without a plan, interpolated."""


def cards(estimate: Estimate, devices: Sequence[Device], progress: Callable[[str], None]) -> list[JobOnGpu]:
    """Return what the job of this estimate takes on each of `devices`, the smallest first."""
    step: JobStep | None = None
    if estimate.retrace is not None and _can_plan(job := estimate.retrace.job):
        progress(f"capturing {job.name}")
        options = Options(device=devices[0], whole_step=job.parallel is not None)
        with suppress(OverspillError):  # a model that is no one graph
            step = step_of(job, options, estimate.software, moves=True)
    least_bytes = None if step is None else step.least_bytes()
    found = []
    for device in sorted(devices, key=lambda device: (device.memory_bytes, device.name)):
        progress(f"estimating on {device.name}")
        on, seconds, planned = estimate.on(device), None, None
        if step is not None and least_bytes is not None:
            graph = step.graph
            seconds = simulate(graph, Liveness().plan(graph, device), device, op_seconds(graph, device)).step_seconds
            tensors = least_bytes - step.account.context_bytes
            planned = tensors + on.outside_bytes <= device.memory_bytes
        found.append(
            JobOnGpu(
                device.name, device.memory_bytes, on.minimum_capacity_bytes, on.fits(), planned, seconds,
                on.expected_largest_batch,
            )
        )  # fmt: skip
    return found


def _can_plan(job: Job) -> bool:
    """Return whether the step can be planned here."""
    try:
        job.check_planned(whole_step=False)
    except OverspillError:
        return False
    return job.batch is not None


def _planned(job: Job, device: Device, software: Software, ask: Callable[[], Unplanned]) -> Found:
    """Return the plans of the job within the device, or the memory that the smallest plan needs.

    Activations are moved first. If that is not enough or takes time, so are parameters and their update, which may then
    be on the host. For a sharded job it is the plan of one rank. `ask` is called behind the first capture.
    """
    least: Advice | None = None
    fitting: list[Plan] = []
    found: list[Advice] = []
    vain: list[tuple[str, str]] = []
    ways = ((False, COMPILED), (True, _TRAIN_STEP)) if job.parallel is None else ((True, _SHARDED),)
    if job.parallel is None and device.host_update_bytes_per_second:
        ways = (*ways, (True, _ON_HOST))
    captures: Partitioned[Any] | None = None
    with suppress(OverspillError), without_collection():  # a model that is no one graph
        captures = captures_of(
            job, Options(device=device, whole_step=ways[0][0]), as_absent(device, software), moves=True
        )
    unplanned = ask()
    if captures is None:
        return [], []
    for whole_step, what in ways:
        policy = "auto:update=auto" if what == _ON_HOST else Auto.name
        if what == _ON_HOST and fitting and fitting[-1].slowdown < _WORTH_UPDATES:
            break
        try:
            options = Options(policy=policy, device=device, whole_step=whole_step)
            plan = preview(job, options, software, unplanned, captures if what == ways[0][1] else None)
        except InfeasibleBudgetError as error:
            needed = error.floor_bytes
            fits = needed <= device.memory_bytes
            one = _ours(what, "time; the same numbers", needed, needed, fits=fits)
            least = min(least or one, one, key=lambda advice: advice.minimum_capacity_bytes or 0)
            continue
        except OverspillError:  # a model that is no one graph
            break
        if fitting and plan.step_seconds * GAIN > fitting[-1].step_seconds:
            vain.append((what, f"no faster than {'with updates on the GPU' if what == _ON_HOST else 'compile'}"))
            continue
        fitting.append(plan)
        found.append(_as_advice(plan, what, unplanned.step_seconds))
        if plan.slowdown <= NEAR:
            break
    return found or ([] if least is None else [least]), vain


def _as_advice(plan: Plan, what: str, unmanaged_seconds: float | None) -> Advice:
    """Return `plan` as advice; its step is its slowdown of the unmanaged one that other changes are compared with."""
    numbers = "the numbers of updates on the host" if plan.schedule.counts[Verb.RUN_ON_HOST] else "the same numbers"
    cost = f"{plan.slowdown:.2f} times the unmanaged step, simulated; {numbers}"
    needed = plan.device_bytes
    return replace(
        _ours(what, cost, needed, plan.asked_bytes, fits=True, on_host=plan.model_on_host, live=plan.pool == LIVE),
        step_seconds=plan.step_seconds if unmanaged_seconds is None else plan.slowdown * unmanaged_seconds,
        unsimulated="", slowdown=plan.slowdown, host_bytes=store_bytes(plan) or None,
    )  # fmt: skip


def _ours(
    what: str,
    cost: str,
    needed: int | None,
    budget_bytes: int,
    *,
    fits: bool,
    on_host: bool = False,
    live: bool = False,
) -> Advice:
    """Return advice to call Overspill: `what`, with the model `on_host` before, in the `live` allocator."""
    called = what.replace("budget=…)", 'budget=…, device="cuda")') if on_host else what
    title = f"{called}, the model on the CPU" if on_host else called
    python = f"model = {called}" if what == COMPILED else f"step = {called}" if what in (_TRAIN_STEP, _ON_HOST) else ""
    return Advice(
        f"{title} in {CALLED}" if live else title, cost, Price.TIME, needed, needed, fits=fits,
        budget_bytes=budget_bytes, trainer=CALLBACK if what == COMPILED and not on_host else "", python=python,
        before=CALLED if live else "", unsimulated="no plan fits",
    )  # fmt: skip
