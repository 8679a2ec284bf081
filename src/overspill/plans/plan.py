"""Make a plan: a policy's schedule, checked and simulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from overspill.bounds.step_time import lower_bound_seconds
from overspill.bounds.whole_step import whole_step_bound_seconds
from overspill.core import Device, Graph, Places, Schedule, Tiers, Timeline, Verb
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.core.reportable import Reportable
from overspill.core.units import format_apart, format_bytes
from overspill.costs import MeasuredTimes, op_seconds
from overspill.planning.effort import EFFORT
from overspill.planning.floor import peak_of, retained_bytes
from overspill.planning.on_host import without
from overspill.planning.overlap import computing_seconds
from overspill.planning.tiers import each_chosen_once, page_bytes, with_tiers
from overspill.policies import POLICIES, Policy, policy_named
from overspill.policies.in_core import Liveness
from overspill.simulate import check, simulate
from overspill.simulate.check_tiers import check_tiers

RECOMPUTING = "checkpoint-cost"
"""What `auto` is on a device whose memory is the host's too."""
NO_LIMIT_BYTES = 1 << 60
"""More than any device has: the budget for a policy that makes one schedule."""


@dataclass(frozen=True, repr=False)
class Plan(Reportable):
    """A checked schedule with its simulated figures. Bytes are live ones, but for those of a device or an allocator."""

    graph: Graph
    schedule: Schedule
    timeline: Timeline
    peak_bytes: int
    budget_bytes: int
    unmanaged_peak_bytes: int
    """Of the same step with nothing moved or recomputed, as is the timeline."""
    unmanaged_timeline: Timeline
    plan_seconds: float
    """Seconds of planning, including all plans that were made for this one."""
    device: Device
    op_seconds: tuple[float, ...]
    """Seconds of the ops with their fastest algorithms."""
    retained_bytes: int
    """Bytes on the device between forward and backward, without persistent tensors."""
    reserved_bytes: int | None = None
    """Bytes that the allocator takes from the device; None if live bytes count, as are the next five."""
    pool: str | None = None
    """The allocator or solver that places its blocks."""
    device_bytes: int | None = None
    """Those bytes and the CUDA context: the card that the plan needs; None if a budget is no card."""
    device_budget_bytes: int | None = None
    """The size of the card that the user gave as the budget."""
    unmanaged_device_bytes: int | None = None
    """Bytes that plain PyTorch takes of the card, by the job's estimate or by the graph."""
    library_bytes: int | None = None
    """Bytes that cuBLAS keeps."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Updates that one call of the optimizer carries out."""
    usual_seconds: float | None = None
    """Seconds of the unmanaged step as PyTorch runs it, if the plan is in pieces of rows or by another partition."""
    places: Places | None = None
    """The planned addresses of blocks in an arena."""
    model_on_host: bool = False
    """Whether the model is in host memory before the first step, and on the device only what the plan has there."""
    tiers: Tiers | None = None
    """Which stored copies are on a disk below host memory, and when; None if the store has no disk below."""
    micro_batches: int = 1
    """How many micro-batches the graph has beside one another."""
    rounds: int = 1
    """In how many such rounds, one after another, a step runs; the plan is that of the last."""
    one_by_one: str = ""
    """Why micro-batches run one after another; empty if they do not, or if nobody knows."""

    @cached_property
    def lower_bound_seconds(self) -> float:
        """Seconds that no schedule in the graph's order beats within the budget (`bounds/step_time.py`).

        For a whole step, those of any order of updates (`bounds/whole_step.py`). With updates on the host, those of a
        step without these.
        """
        bound = whole_step_bound_seconds if self.graph.whole_step else lower_bound_seconds
        graph, kept = without(self.graph, self.schedule.targets(Verb.RUN_ON_HOST))
        seconds = computing_seconds(graph, [self.op_seconds[op] for op in kept])
        return bound(graph, self.device, self.most_live_bytes, seconds)

    def for_budget(self, budget_bytes: int) -> Plan:
        """Return the same plan for another budget that it fits, of a GPU's memory or live bytes."""
        if self.device_bytes is None:
            return replace(self, budget_bytes=budget_bytes)
        return replace(self, device_budget_bytes=budget_bytes)

    @property
    def most_live_bytes(self) -> int:
        """The most live bytes that the budget allows: all of it, or what a card has without the context."""
        if self.device_budget_bytes is None or self.device_bytes is None or self.reserved_bytes is None:
            return self.budget_bytes
        return self.device_budget_bytes - (self.device_bytes - self.reserved_bytes)

    @property
    def fits_device(self) -> bool:
        """Whether the device has enough memory for the plan; a budget that is a share of the step may exceed it."""
        has = self.device.usable_bytes if self.device_bytes is None else self.device.memory_bytes
        return self.needed_bytes <= has

    @property
    def asked_bytes(self) -> int:
        """The budget as it was given: live bytes, or a card's size."""
        return self.budget_bytes if self.device_budget_bytes is None else self.device_budget_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes that the plan needs: of a card, of an allocator or live, as the budget is."""
        return self.taken_bytes if self.device_bytes is None else self.device_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes that the plan takes: of an allocator, or live."""
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes

    @property
    def allocated_bytes(self) -> int:
        """The most bytes allocated at once: the arena and bytes live outside it, or live bytes; and cuBLAS's."""
        tensors = self.peak_bytes if self.places is None else self.places.total_bytes
        return tensors + (self.library_bytes or 0)

    @property
    def unmanaged_bytes(self) -> int:
        """Bytes of the unmanaged step, live or of a card, as `overspill.estimate` counts; budgets may be shares."""
        return self.unmanaged_peak_bytes if self.unmanaged_device_bytes is None else self.unmanaged_device_bytes

    @property
    def is_managed(self) -> bool:
        """Whether it moves or recomputes anything that lowers the peak."""
        return self.peak_bytes < self.unmanaged_peak_bytes

    @property
    def gap(self) -> float:
        """How far the step is above the lower bound, as a share of it: the most that can be gained."""
        return self.step_seconds / self.lower_bound_seconds - 1 if self.lower_bound_seconds else 0.0

    @property
    def step_seconds(self) -> float:
        """Simulated seconds of one step."""
        return self.timeline.step_seconds

    @property
    def in_core_seconds(self) -> float:
        """Simulated seconds of the unmanaged step."""
        return self.unmanaged_timeline.step_seconds if self.usual_seconds is None else self.usual_seconds

    @property
    def slowdown(self) -> float:
        """Simulated step time over that of the unmanaged step."""
        return self.step_seconds / self.in_core_seconds if self.in_core_seconds else 1.0

    @cached_property
    def disk_slowdown(self) -> float:
        """Simulated step time over that with host memory for all that is in the store."""
        if self.tiers is None or not self.tiers.stays:
            return 1.0
        return self.step_seconds / simulate(self.graph, self.schedule, self.device, self.op_seconds).step_seconds

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that go to the store in one step."""
        return sum(self.graph.tensors[t].nbytes for t in self.schedule.targets(Verb.OFFLOAD))

    @property
    def prefetched_bytes(self) -> int:
        """Bytes that come back in one step."""
        return sum(self.graph.tensors[t].nbytes for t in self.schedule.targets(Verb.PREFETCH))

    def check_host(self) -> None:
        """Raise RequestError if the store's host memory is too small for the plan."""
        if self.tiers is not None and not self.tiers.fits:
            least = self.tiers.host_peak_bytes
            raise RequestError(
                f"host_budget={format_bytes(self.tiers.host_budget_bytes)} is too small: copies on their way to the "
                f'device or back take {format_bytes(least)} of host memory at once; host_budget="{least}B" would do'
            )

    @property
    def disk_written_bytes(self) -> int:
        """Bytes that one step writes to a disk below host memory, in whole pages."""
        return 0 if self.tiers is None else sum(self._in_pages(tensor) for tensor in self.tiers.written)

    @property
    def disk_read_bytes(self) -> int:
        """Bytes that one step reads from it."""
        return 0 if self.tiers is None else sum(self._in_pages(stay.tensor) for stay in self.tiers.stays)

    def _in_pages(self, tensor: int) -> int:
        return page_bytes(self.graph.tensors[tensor].nbytes)

    @property
    def recomputed_flops(self) -> int:
        """FLOPs of recomputed ops."""
        return sum(self.graph.ops[op].flops for op in self.schedule.targets(Verb.RECOMPUTE))

    @property
    def recomputed_ops(self) -> int:
        """The number of recomputed ops."""
        return len(self.schedule.targets(Verb.RECOMPUTE))

    @property
    def recomputing_seconds(self) -> float:
        """Simulated seconds of recomputation in one step."""
        again = (e for e in self.timeline.events if e.verb is Verb.RECOMPUTE)
        return sum((e.end_seconds - e.start_seconds for e in again), 0.0)


def unmanaged_peak(graph: Graph, device: Device) -> int:
    """Return the peak bytes of plain training: every tensor is freed at its last use."""
    return check(graph, Liveness().plan(graph, device)).peak_bytes


def make_plan(
    graph: Graph, device: Device, policy: str | Policy, budget_bytes: int, times: MeasuredTimes | None = None
) -> Plan:
    """Return the checked and simulated plan of `policy`.

    With unified memory `auto` is `checkpoint-cost`, for the store is in the memory that is short. Raises
    InfeasibleBudgetError if its peak is over `budget_bytes`, unless the policy has no limit.
    """
    begun = time.perf_counter()
    chosen = policy_named(policy)
    if device.unified_memory and chosen.offloads:
        if chosen.name != "auto":
            raise _frees_nothing(graph, device, chosen, budget_bytes)
        chosen = policy_named(RECOMPUTING)
    seconds = op_seconds(graph, device, times)
    budget = budget_bytes if chosen.plans_for_budget else None
    with each_chosen_once():
        schedule = chosen.plan(graph, device, budget, times)
        if not isinstance(schedule, Schedule):
            raise RequestError(
                f"policy {chosen} gave {schedule!r}, which is no Schedule; its `_plan` is to return what `assemble` "
                "makes"
            )
        tiers, timeline = tiers_of(graph, schedule, device, seconds)
    # Verify the schedule independently of the policy.
    result = check(graph, schedule)
    if result.peak_bytes > budget_bytes and not chosen.unlimited:
        raise _over_budget(graph, schedule, device, budget_bytes)
    # Simulate it, and the unmanaged step for comparison.
    plain = Liveness().plan(graph, device)
    return Plan(
        graph=graph,
        schedule=schedule,
        timeline=timeline,
        peak_bytes=result.peak_bytes,
        budget_bytes=budget_bytes,
        unmanaged_peak_bytes=check(graph, plain).peak_bytes,
        unmanaged_timeline=simulate(graph, plain, device, seconds),
        plan_seconds=time.perf_counter() - begun,
        device=device,
        op_seconds=seconds,
        retained_bytes=retained_bytes(graph, schedule),
        tiers=tiers,
    )


def plans_once(
    device: Device, policy: str | Policy, times: MeasuredTimes | None = None
) -> Callable[[Graph, int], Plan]:
    """Return `make_plan` for graphs and live bytes, each plan made once: budgets that are near ask for the same."""
    plans: dict[tuple[int, int, float], Plan] = {}

    def made(graph: Graph, live_bytes: int) -> Plan:
        key = id(graph), live_bytes, EFFORT.get()
        if key not in plans:
            plans[key] = make_plan(graph, device, policy, live_bytes, times)
        return plans[key]

    return made


def tiers_of(
    graph: Graph, schedule: Schedule, device: Device, seconds: Sequence[float]
) -> tuple[Tiers | None, Timeline]:
    """Return the checked tiers of `schedule` on `device`, if its store has a disk below, and its timeline."""
    tiers, timeline = with_tiers(
        graph, schedule, device, lambda tiers: simulate(graph, schedule, device, seconds, tiers)
    )
    if tiers is not None and tiers.fits:
        check_tiers(graph, schedule, tiers)
    return tiers, timeline


def most_known(found: Iterable[int | None]) -> int | None:
    """Return the largest of the numbers that are not None; None if all are."""
    return max((number for number in found if number is not None), default=None)


NOTHING_BYTES = 1
"""The budget that asks for the smallest that works."""


def smallest_budget(plan: Callable[[int], Plan]) -> int:
    """Return the smallest budget, in bytes, for which `plan_within` has a plan."""
    try:
        return plan(NOTHING_BYTES).needed_bytes
    except InfeasibleBudgetError as error:
        return error.floor_bytes


def _frees_nothing(graph: Graph, device: Device, policy: Policy, budget_bytes: int) -> InfeasibleBudgetError:
    """Return the error of a policy that moves tensors, on a device whose memory is the host's too."""
    cause = f"{device.name} shares its memory with the host, so that what {policy} moves frees nothing"
    hint = f"policy {RECOMPUTING} recomputes instead, and auto takes it"
    return InfeasibleBudgetError(
        f"infeasible: {cause}; {hint}",
        budget_bytes=budget_bytes,
        floor_bytes=unmanaged_peak(graph, device),
        cause=cause,
        hints=(hint,),
    )


def _over_budget(graph: Graph, schedule: Schedule, device: Device, budget_bytes: int) -> InfeasibleBudgetError:
    """Return the error of a policy with one schedule, with the budget that `auto` could meet."""
    needed = peak_of(graph, schedule)
    try:
        POLICIES["auto"]().plan(graph, device, budget_bytes)
        hint = "policy auto can meet this budget"
    except InfeasibleBudgetError as error:
        hint = f"no policy can meet less than {format_bytes(error.floor_bytes)}"
    least, budget = format_apart(needed.nbytes, budget_bytes)
    return InfeasibleBudgetError(
        f"infeasible: policy {schedule.policy} needs {least} ({needed.cause}), over the budget of {budget}; {hint}",
        budget_bytes=budget_bytes,
        floor_bytes=needed.nbytes,
        cause=needed.cause,
        hints=(hint,),
    )
