"""Advice on a job, including Overspill's own plans for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from overspill.core.errors import InfeasibleBudgetError, OverspillError
from overspill.estimation.advice import Advice, Price, advice
from overspill.estimation.estimate import Estimate
from overspill.job import Job
from overspill.placement.allocators.planned import CALLED, LIVE
from overspill.plans.plan import Plan

from .options import Options
from .preview import preview
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
        what = f"{what}, the model on the CPU"
    if plan.pool == LIVE:
        what = f"{what} in {CALLED}"
    needed = plan.device_bytes
    return Advice(
        what, cost, Price.TIME, needed, needed, fits=True, step_seconds=plan.step_seconds, slowdown=plan.slowdown,
        host_bytes=store_bytes(plan) or None,
    )  # fmt: skip
