"""Memory and cost of jobs: one step of each is captured on fake tensors, and planned. Nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from overspill.capture.compiled.cut_step import CapturedCutStep
from overspill.capture.recording.graph import graph_of
from overspill.core import Device, Graph
from overspill.core.budget import Budget
from overspill.core.device import ABSENT
from overspill.core.errors import InfeasibleBudgetError, RequestError, UnsupportedError
from overspill.core.forked import copied
from overspill.core.garbage import without_collection
from overspill.core.progress import progress
from overspill.costs.context import budget_bytes, context_bytes
from overspill.costs.releases import software_named
from overspill.costs.scratch import Software
from overspill.estimation.api import Setting
from overspill.estimation.api import of_job as estimate_of
from overspill.estimation.script import of_script
from overspill.job import Job, Script
from overspill.job.source import Source
from overspill.planning.algorithms import memory_optimal
from overspill.planning.effort import at_effort
from overspill.planning.floor import floor_of
from overspill.planning.step_program import StepProgram
from overspill.plans.account import Account
from overspill.plans.comparison import Comparison, Row, compare
from overspill.plans.fit import FIRST_EFFORT, Fit
from overspill.plans.plan import Plan
from overspill.plans.sweep import Sweep, sweep
from overspill.policies import Policy, policy_named
from overspill.policies.auto import Auto
from overspill.policies.auto.host_updates import DEVICE, check_rate

from .capture_job import captures_of, with_programs
from .compiled.partitions import Partitioned
from .hardware import account_of, allocator_config, as_absent, device_named
from .infeasible import split_update
from .options import OWN, Options
from .step.beside import OneByOne, beside
from .step.beside import step_of as step_of_all
from .step.gathered import gathered
from .transfer.registry import store_for

CPU = torch.device("cpu")
NARROW = 16
"""A largest batch is known to such a part of it."""
NEARLY = 4
"""A batch's step that takes so many times the time that it may take more is planned once more, with full effort."""
C = TypeVar("C")
R = TypeVar("R")


class Taken(Protocol):
    """What a job takes of a GPU without a plan, by its estimate."""

    @property
    def outside_bytes(self) -> int:
        """Bytes outside of the allocator."""

    @property
    def total_bytes(self) -> int:
        """Bytes in all."""

    @property
    def budget_bytes(self) -> int:
        """The budget where the user names none."""


class Estimated(NamedTuple):
    """That by an estimate which is made in a copy of this process."""

    outside_bytes: int
    total_bytes: int
    budget_bytes: int


class Recorded(NamedTuple):
    """A step recorded on a virtual GPU, which has only its graph."""

    graph: Graph


@dataclass(frozen=True)
class JobStep:
    """A captured step of a job, and the account of its budget."""

    job: Job
    options: Options
    account: Account
    captures: Partitioned[Any]
    """As PyTorch runs it, or as stock torch.compile does; and in pieces of rows, or by other partitions."""

    @property
    def graph(self) -> Graph:
        """The graph of the usual capture."""
        return self.captures.graph

    @cached_property
    def planner(self) -> Callable[[int], Plan]:
        """A function from a budget in bytes to the best plan."""
        return self.captures.planner(self.options, self.account)

    def budget_bytes(self) -> int:
        """Return the budget in bytes. Raises RequestError."""
        return self.account.bytes_of(self.options.limit, self.graph, self.planner)

    def plan(self) -> Plan:
        """Return the plan within the budget. Raises InfeasibleBudgetError."""
        runs_here = self.account.device.kind == "cpu" or self.options.backend == "inductor"
        try:
            plan = self.planner(self.budget_bytes())
        except InfeasibleBudgetError as error:
            stays = not any(isinstance(captured, CapturedCutStep) for captured in self.captures)
            by_calls = self.options.backend == "eager" and not (
                self.options.whole_step or isinstance(self.job.model, Script)
            )
            raise error.with_help(split_update(error)) if by_calls and stays else error from None
        plan.check_host()
        if (count := self.job.accumulate) > 1:
            plan = replace(plan, rounds=count)
        if not self.options.whole_step or self.job.parallel is not None:
            return plan
        captured = self.captures.of(plan.graph)
        if count > 1:
            try:
                plan = beside(captured, plan, count, self.options, self.account)
            except OneByOne as why:
                plan = replace(plan, one_by_one=str(why))
        if not runs_here or self.options.profile:
            return plan
        if plan.micro_batches > 1:
            captured = step_of_all(captured, plan).of(plan.graph)
        return gathered(captured, plan, self.account.measured)

    def least_bytes(self) -> int | None:
        """Return bytes that no plan by `auto` does without; None if it takes other captures long to say."""
        if self.options.backend != "eager" or str(policy_named(self.options.policy)) != Auto.name:
            return None
        programs = (StepProgram(one.graph, algorithms=memory_optimal(one.graph)) for one in self.captures)
        return min(floor_of(program).nbytes for program in programs) + self.account.context_bytes

    def accounts(self, placement: str | None, software: Software | None) -> Callable[[Policy], Account]:
        """Return a function from a policy to its account; on a GPU in its own pool, if no `placement` is given."""
        own = OWN if placement is None and self.account.is_card else placement

        def account_for(policy: Policy) -> Account:
            options = replace(self.options, policy=policy, placement=own)
            return account_of(options, self.account.device, CPU, software, self.account.estimated_bytes)

        return account_for

    def best(self, search_in: Callable[[Graph], Fit]) -> Plan:
        """Return the best of the plans found by a search in each capture."""
        return self.captures.best_plan(lambda step: search_in(step.graph), self.options.times)


def preview(
    job: Job,
    options: Options,
    software: Software | None = None,
    estimate: Taken | None = None,
    captures: Partitioned[Any] | None = None,
) -> Plan:
    """Return the plan of a job, made on fake tensors, without memory or a run.

    For a CPU it is the plan that the run would make. `software` is that of a GPU that this machine does not have; None:
    that of this machine. `estimate` is the estimate of the job there, and `captures` are its step's; None: not made
    yet. Raises RequestError and InfeasibleBudgetError.
    """
    return _previewed(job, options, software, estimate, JobStep.plan, captures)


def preview_with_least(job: Job, options: Options, software: Software | None = None) -> tuple[Plan, int | None]:
    """Return the plan of a job, as `preview` does, and bytes that no plan of it does without; None if unknown."""
    return _previewed(job, options, software, None, lambda step: (step.plan(), step.least_bytes()))


def largest_batch(
    job: Job, options: Options, software: Software | None, most_slowdown: float, tell: Callable[[str], None]
) -> int:
    """Return about the largest batch whose step is planned within the budget and at most so much slower than without.

    It is found from the job's own batch by doubling and halving, to a 16th, as if larger batches always took longer.
    `tell` gets a line about each batch that is tried. Raises RequestError if a batch of 1 is slower.
    """

    def is_planned(batch: int) -> bool:
        tell(f"planning batch {batch}, to find the largest")
        try:
            with at_effort(FIRST_EFFORT):
                plan = preview(replace(job, batch=batch), options, software)
            # With more effort a plan that is nearly fast enough may be.
            if plan.fits_device and most_slowdown < plan.slowdown < 1 + NEARLY * (most_slowdown - 1):
                plan = preview(replace(job, batch=batch), options, software)
        except InfeasibleBudgetError:
            return False
        return plan.fits_device and plan.slowdown <= most_slowdown

    low, high = 0, job.batch or 1
    while is_planned(high):
        low, high = high, 2 * high
    while high - low > max(1, low // NARROW):
        middle = (low + high) // 2
        low, high = (middle, high) if is_planned(middle) else (low, middle)
    if not low:
        raise RequestError(f"no batch has a plan within {most_slowdown - 1:.1%} more time; allow more, or more memory")
    return low


def _previewed(
    job: Job,
    options: Options,
    software: Software | None,
    estimate: Taken | None,
    asked: Callable[[JobStep], R],
    captured: Partitioned[Any] | None = None,
) -> R:
    """Return what is `asked` of the captured step."""
    with without_collection():  # of many small objects, none of which is garbage; it takes a tenth of the time
        if options.backend == "eager":
            return asked(_step(job, options, software, estimate, captured, moves=True))
        # Inductor's programs are written while they are planned.
        options, account, _ = _asked(job, options, software, estimate, lambda *_: None)
        return with_programs(
            job, options, account.device, lambda captures: asked(JobStep(job, options, account, captures))
        )


def step_of(job: Job, options: Options, software: Software | None = None, *, moves: bool = False) -> JobStep:
    """Return the step of a job that `preview` plans; a step in a loop `moves` all of its memory, or activations alone.

    With Inductor's kernels it has only the usual capture. Raises RequestError.
    """
    return _step(job, options, software, moves=moves)


def _step(
    job: Job,
    options: Options,
    software: Software | None,
    estimate: Taken | None = None,
    captured: Partitioned[Any] | None = None,
    *,
    moves: bool,
) -> JobStep:
    """Return the step, which may be `captured` already."""

    def capture(options: Options, device: Device) -> Partitioned[Any]:
        return captured or captures_of(job, options, device, moves=moves)

    options, account, captures = _asked(job, options, software, estimate, capture)
    return JobStep(job, options, account, captures)


def compare_job(
    job: Job,
    options: Options,
    policies: Iterable[str | Policy],
    progress: Callable[[str], None] | None = None,
    software: Software | None = None,
) -> Comparison:
    """Return a row for each of `policies` on one step of a job within the budget. Raises RequestError.

    On a GPU each has its own pool, unless another is asked for. If none fits, `auto` is tried too.
    """
    step = step_of(job, options, software, moves=True)
    budget_bytes = step.budget_bytes()

    def rows_of(asked: Iterable[str | Policy], placement: str | None) -> list[Row]:
        account_for = step.accounts(placement, software)
        graph, device = step.graph, step.account.device
        return compare(graph, device, asked, budget_bytes, options.times, progress, account_for, step.best)

    rows, instead = rows_of(policies, options.placement), None
    tried = options.placement is None and any(row.policy == Auto.name for row in rows)
    if step.account.is_card and not tried and not any(row.fits for row in rows):
        (ours,) = rows_of([Auto.name], None)
        instead = ours if ours.fits else None
    return Comparison(tuple(rows), step.account.device, budget_bytes, instead)


def sweep_job(
    job: Job,
    options: Options,
    policies: Iterable[str | Policy],
    points: int,
    progress: Callable[[str], None] | None = None,
    software: Software | None = None,
) -> Sweep:
    """Return the cost of one step of a job by each of `policies` at `points` budgets. Raises RequestError."""
    step = step_of(job, options, software, moves=True)
    account, account_for = step.account, step.accounts(options.placement, software)
    return sweep(step.graph, account.device, policies, points, options.times, progress, account, step.best, account_for)


def _asked(
    job: Job,
    options: Options,
    software: Software | None,
    estimate: Taken | None,
    capture: Callable[[Options, Device], C],
) -> tuple[Options, Account, C | Partitioned[Any]]:
    """Return the options, the account of the budget, and the recorded step of a script, or what `capture` returns.

    It is called while a copy of this process makes the estimate. Raises RequestError.
    """
    options = _checked(job, options)
    asked = _device_of(options)
    device = as_absent(asked, software)
    if device.index != ABSENT:
        if isinstance(job.model, Script):
            raise RequestError(f"script='{job.name}': is recorded on a GPU that is not there; name which, with gpu=")
        return options, account_of(options, device, CPU, software), capture(options, device)
    # The estimate says what the job takes unmanaged, and what it takes outside of the allocator.
    setting = Setting(asked, "pytorch", allocator_config(), software or software_named())
    recorded: C | Partitioned[Any]
    if isinstance(job.model, Script):
        estimate, done = of_script(job.model, setting, job.model.tell, quiet=True, whole_steps=True)
        if not done.trains:
            raise RequestError(
                f"script='{job.name}': it only runs models, and a plan is of a training step; estimate it"
            )
        recorded = Partitioned([Recorded(graph_of(estimate.recording, estimate.name))])
    elif estimate is None:
        progress("what it takes without a plan")
        estimating = partial(_estimated, job, setting, compiled=options.backend == "inductor")
        if isinstance(job.model, Source):  # the user's code runs in this process alone
            (estimate,), recorded = next(estimating()), capture(options, device)
        else:
            with copied(estimating) as found:
                recorded = capture(options, device)
                (estimate,) = next(found)
    else:
        recorded = capture(options, device)
    if options.limit == Budget():
        outside = context_bytes(asked, setting.software.cuda_version)
        whole = budget_bytes(asked, outside) if estimate is None else estimate.budget_bytes
        options = replace(options, budget=Budget(nbytes=whole))
    if estimate is None:
        return options, account_of(options, device, CPU, software), recorded
    device = replace(device, context_bytes=estimate.outside_bytes)
    return options, account_of(options, device, CPU, software, estimate.total_bytes), recorded


def _device_of(options: Options) -> Device:
    """Return the device, which has the store and can update where `options` say. Raises RequestError."""
    asked = device_named(options.device, CPU)
    if options.store is not None:
        store_for(options.store, asked.kind)
    if getattr(policy_named(options.policy), "update", DEVICE) != DEVICE:
        check_rate(asked)
    return asked


def _checked(job: Job, options: Options) -> Options:
    """Return `options`, with the whole step if a job is on several GPUs.

    Raises RequestError for a job that cannot be planned.
    """
    if isinstance(job.model, Script):
        if options.whole_step or options.backend != "eager":
            other = "whole_step=" if options.whole_step else f"backend={options.backend}"
            raise RequestError(f"script='{job.name}': its recorded step is planned, without {other}; leave that out")
        return options
    if job.parallel is not None:
        if options.backend != "eager":
            raise RequestError(
                f"backend={options.backend}: a step with {job.parallel.kind} is planned with eager's kernels; leave "
                "one out",
                fields=["parallel"],
            )
        options = replace(options, whole_step=True)
    job.check_planned(whole_step=options.whole_step)
    return options


def _estimated(job: Job, setting: Setting, *, compiled: bool) -> Iterator[tuple[Estimated | None]]:
    """Yield the estimate of the job without Overspill; None if it cannot be estimated, as with computed values."""
    try:
        made = estimate_of(job, setting, compiled=compiled)
    except (RequestError, UnsupportedError):
        yield (None,)
        return
    figures = made.compiled or made
    yield (Estimated(figures.outside_bytes, figures.total_bytes, figures.budget_bytes),)
