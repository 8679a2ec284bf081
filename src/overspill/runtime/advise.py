"""Advice on a job, including Overspill's own plans for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from overspill.core import Device
from overspill.core.errors import InfeasibleBudgetError, OverspillError
from overspill.costs import op_seconds
from overspill.estimation.advice import Advice, Price, advice
from overspill.estimation.estimate import Estimate
from overspill.job import Job
from overspill.placement.allocators.planned import CALLED, LIVE
from overspill.plans.plan import Plan
from overspill.policies.in_core import Liveness
from overspill.simulate import simulate

from .options import Options
from .preview import JobStep, preview, step_of
from .transfer.stores import store_bytes

_COMPILE, _TRAIN_STEP = "overspill.compile(model, budget=…)", "overspill.train_step(…)"
_SHARDED = "overspill.train_step(…) of the model in fully_shard"


def advise(
    estimate: Estimate, progress: Callable[[str], None] | None = None, vain: Callable[[str, str], object] | None = None
) -> Iterator[Advice]:
    """Yield the changes that would help the job of this estimate, each one tried, the cheapest first.

    `progress` gets a line about the present work. `vain` gets each change that does not help, and why.
    """
    planner = None
    if estimate.retrace is not None and _can_plan(job := estimate.retrace.job):
        planner = partial(_planned, job, estimate)
    return advice(estimate, planner, progress, vain=vain)


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


def _planned(job: Job, estimate: Estimate) -> Advice | None:
    """Return the plan of the job within all of the device, or the memory that the smallest plan needs.

    Activations are moved first. If that is not enough, so are parameters and their update. For a sharded job it is the
    plan of one rank.
    """
    least = None
    ways = ((False, _COMPILE), (True, _TRAIN_STEP)) if job.parallel is None else ((True, _SHARDED),)
    for whole_step, what in ways:
        try:
            options = Options(device=estimate.device, whole_step=whole_step)
            return _as_advice(preview(job, options, estimate.software, estimate), what)
        except InfeasibleBudgetError as error:
            found = Advice(what, "time; the same numbers", Price.TIME, error.floor_bytes, error.floor_bytes, fits=False)
            least = min(least or found, found, key=lambda advice: advice.minimum_capacity_bytes or 0)
        except OverspillError:  # a model that is no one graph
            return least
    return least


def _as_advice(plan: Plan, what: str) -> Advice:
    cost = f"{plan.slowdown:.2f} times the unmanaged step, simulated; the same numbers"
    if plan.model_on_host:
        what = what.replace("budget=…)", 'budget=…, device="cuda")') + ", the model on the CPU"
    if plan.pool == LIVE:
        what = f"{what} in {CALLED}"
    needed = plan.device_bytes
    return Advice(
        what, cost, Price.TIME, needed, needed, fits=True, step_seconds=plan.step_seconds, slowdown=plan.slowdown,
        host_bytes=store_bytes(plan) or None,
    )  # fmt: skip
