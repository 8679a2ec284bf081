"""Advice on a job, including Overspill's own plans for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from overspill.core import Device, Verb
from overspill.core.budget import Budget
from overspill.core.errors import InfeasibleBudgetError, OverspillError
from overspill.costs import op_seconds
from overspill.estimation.advice import CALLBACK, COMPILED, Advice, Price, Vain, advice
from overspill.estimation.estimate import Estimate
from overspill.job import Job
from overspill.placement.allocators.planned import CALLED, LIVE
from overspill.plans.fit import GAIN, NEAR
from overspill.plans.plan import Plan
from overspill.policies.auto import Auto
from overspill.policies.in_core import Liveness
from overspill.simulate import simulate

from .options import Options
from .preview import JobStep, preview, step_of
from .transfer.stores import store_bytes

_TRAIN_STEP = "overspill.train_step(model, loss_fn, optimizer, budget=…)"
_ON_HOST = 'overspill.train_step(model, loss_fn, optimizer, update="auto", budget=…)'
_WORTH_UPDATES = 1.1
"""The slowdown from which updates on the host are tried too; they take as long to plan as all before."""
_SHARDED = f"{_TRAIN_STEP} of the model in fully_shard"
OTHERS = 0.02
"""The share of a GPU's memory that a budget leaves to other programs, as a display, and to the loop's own tensors."""


def advise(
    estimate: Estimate, progress: Callable[[str], None] | None = None, vain: Vain | None = None
) -> Iterator[Advice]:
    """Yield the changes that would help the job of this estimate, each one tried, the cheapest first.

    `progress` gets a line about the present work. `vain` gets each change that does not help, and why.
    """
    planner = None
    if estimate.retrace is not None and _can_plan(job := estimate.retrace.job):
        planner = partial(_planned, job, estimate, vain or (lambda *_: None))
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


def _planned(job: Job, estimate: Estimate, vain: Vain) -> list[Advice]:
    """Return the plans of the job within the device, or the memory that the smallest plan needs.

    Activations are moved first. If that is not enough or takes time, so are parameters and their update, which may then
    be on the host. For a sharded job it is the plan of one rank.
    """
    device = estimate.device
    least: Advice | None = None
    fitting: list[Plan] = []
    found: list[Advice] = []
    ways = ((False, COMPILED), (True, _TRAIN_STEP)) if job.parallel is None else ((True, _SHARDED),)
    if job.parallel is None and device.host_update_bytes_per_second:
        ways = (*ways, (True, _ON_HOST))
    for whole_step, what in ways:
        policy = "auto:update=auto" if what == _ON_HOST else Auto.name
        if what == _ON_HOST and fitting and fitting[-1].slowdown < _WORTH_UPDATES:
            break
        try:
            options = Options(Budget(nbytes=_budget_bytes(estimate)), policy, device=device, whole_step=whole_step)
            plan = preview(job, options, estimate.software, estimate)
        except InfeasibleBudgetError as error:
            needed = error.floor_bytes
            fits = needed <= device.memory_bytes
            one = _ours(what, "time; the same numbers", needed, needed, fits=fits)
            least = min(least or one, one, key=lambda advice: advice.minimum_capacity_bytes or 0)
            continue
        except OverspillError:  # a model that is no one graph
            break
        if fitting and plan.step_seconds * GAIN > fitting[-1].step_seconds:
            vain(what, "no faster than with updates on the GPU" if what == _ON_HOST else "no faster than compile")
            continue
        fitting.append(plan)
        found.append(_as_advice(plan, what, estimate.step_seconds()))
        if plan.slowdown <= NEAR:
            break
    return found or ([] if least is None else [least])


def _budget_bytes(estimate: Estimate) -> int:
    """Return the budget to name: the device's memory, without what the context may take more and what others take."""
    memory, outside = estimate.device.memory_bytes, estimate.context + estimate.communication
    spare = max(outside.high - outside.central, int(OTHERS * memory))
    return max(memory - spare, memory // 2) >> 20 << 20


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
