"""Which plan of a step is fastest: updates on the device, on the host or some on each; for its link or a slower one.

Of what cannot be faster than the best so far no plan is searched, and no stays on the disk are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from overspill.core import Device, Graph, Schedule, Stream, TensorKind, Timeline, Verb
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.planning.fastest import moved_bytes
from overspill.planning.floor import retained_bytes
from overspill.planning.on_host import HostUpdates, balanced, begun_when_free, in_time, updates_of
from overspill.planning.tiers import StoredCopies
from overspill.simulate import simulate

DEVICE, HOST, AUTO = UPDATES = ("device", "host", "auto")
"""Where updates run: on the device; on the host, all that can; wherever the step is faster."""
AHEAD = 3
"""How many of the largest gradients a plan sets memory aside for, so that compute need not wait for them to leave."""
WAITS = 0.01
"""Such a plan is made if compute waits for so much of the step otherwise."""
AS_SLOW_AS_DISK = (0.5, 1.0)
"""How near to the disk's rate the link is taken to be in further plans where the disk limits a step; 1: equal."""
SPARED = 1 / 3
"""They are made if so much of the step could be spared."""

Make = Callable[[Graph, Device, int | None, tuple[float, ...]], Schedule]


@dataclass(frozen=True)
class _Candidate:
    """A plan within the budget, its timeline without a disk, and its stored copies if there is a disk."""

    made: Schedule
    alone: Timeline
    copies: StoredCopies | None

    @property
    def is_limited(self) -> bool:
        """Whether the disk takes longer than all else."""
        return self.copies is not None and self.copies.least_seconds >= self.alone.step_seconds

    @property
    def least_seconds(self) -> float:
        """A bound on its step."""
        return (
            self.alone.step_seconds if self.copies is None else max(self.alone.step_seconds, self.copies.least_seconds)
        )


def check_rate(device: Device) -> None:
    """Raise RequestError if it is unknown how fast the host of `device` updates weights."""
    if not device.host_update_bytes_per_second:
        raise RequestError(
            f"update=: how fast the host of {device.name} updates weights is unknown; give its device file a "
            "host_update_bytes_per_second, which `overspill calibrate` measures"
        )


class Ways:
    """Plans by `make` of a step within a budget."""

    def __init__(
        self, make: Make, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]
    ) -> None:
        self._make, self._graph, self._device, self._seconds = make, graph, device, seconds
        self._budget_bytes = budget_bytes
        self._errors: list[InfeasibleBudgetError] = []
        self._tried: set[tuple[int, ...]] = {()}
        self._in_time: tuple[float, tuple[int, ...]] = math.inf, ()
        """Of the fastest plan with updates on the host, without its disk: its seconds, and updates that end in time."""
        self._best: tuple[tuple[float, int], Schedule, float] | None = None
        """The fastest: its step's seconds and moved bytes, the schedule, and the seconds in which the disk is busy."""

    def best(self, update: str) -> Schedule:
        """Return the fastest schedule for `update`, one of UPDATES.

        Raises RequestError if the host can run no update, and InfeasibleBudgetError.
        """
        if update != DEVICE:
            self._check_host()
        if update != HOST:
            self._weigh_on_device()
        if update == AUTO and self._best is not None:
            self._weigh_with(balanced(self._graph, self._best[1], self._device, self._seconds, self._best[2]))
        if update != DEVICE:
            self._weigh_with(self._all)
        if update == AUTO:
            self._weigh_with(self._in_time[1])
        if self._best is None:
            raise min(self._errors, key=lambda error: error.floor_bytes)
        return replace(self._best[1], budget_bytes=self._budget_bytes)

    def _check_host(self) -> None:
        check_rate(self._device)
        if not self._all:
            raise RequestError(
                f"update=: the host can run no update of {self._graph.name}; leave it out, or take an optimizer whose "
                "state may leave the device"
            )

    @cached_property
    def _all(self) -> tuple[int, ...]:
        return updates_of(self._graph)

    @property
    def _best_seconds(self) -> float:
        return math.inf if self._best is None else self._best[0][0]

    def _weigh_on_device(self) -> None:
        """Weigh plans with all updates on the device: for its link, and for slower ones where the disk limits it."""
        device = self._device
        slower = (_with_slower_link(device, share) for share in (AS_SLOW_AS_DISK if device.host_bytes else ()))
        found = []
        for linked in (device, *slower):
            one = self._candidate(partial(self._make, self._graph, linked, self._budget_bytes, self._seconds))
            if one is None:
                break
            if self._may_spare(one, one.least_seconds):
                found.append(one)
            elif not self._may_spare(one, self._take([one])):
                break
        self._take(found)

    def _weigh_with(self, updates: tuple[int, ...]) -> None:
        """Weigh plans with these updates on the host, unless they cannot be faster."""
        host = HostUpdates(self._graph, updates, self._device, self._seconds)
        if updates in self._tried or host.least_seconds(self._budget_bytes) >= self._best_seconds:
            return
        self._tried.add(updates)

        def made(ahead: int) -> Schedule:
            planned_bytes = None if self._budget_bytes is None else max(1, self._budget_bytes - sum(largest[:ahead]))
            planned = self._make(host.rest, self._device, planned_bytes, host.seconds)
            return host.schedule(planned, self._budget_bytes)

        largest = sorted((t.nbytes for t in self._graph.tensors if t.kind is TensorKind.GRADIENT), reverse=True)
        if self._weigh(partial(made, 0)):
            self._weigh(partial(made, AHEAD))

    def _candidate(self, plan: Callable[[], Schedule]) -> _Candidate | None:
        """Return the candidate that `plan` makes; None if there is none within the budget."""
        try:
            found = self._with_copies(plan())
        except InfeasibleBudgetError as error:
            self._errors.append(error.with_traceback(None))  # whose frames would live on
            return None
        return None if self._budget_bytes is not None and found.alone.peak_bytes > self._budget_bytes else found

    def _with_copies(self, made: Schedule) -> _Candidate:
        copies = StoredCopies(self._graph, made, self._device) if self._device.host_bytes else None
        return _Candidate(made, simulate(self._graph, made, self._device, self._seconds), copies)

    def _weigh(self, plan: Callable[[], Schedule]) -> bool:
        """Weigh a plan with updates on the host, and return whether copies out are waited for, and no disk limits it.

        What is returned depends on no other plan.
        """
        if (one := self._candidate(plan)) is None:
            return False
        timeline = one.alone
        out = f"{Stream.OFFLOAD} of"
        waited = sum(s.end_seconds - s.start_seconds for s in timeline.stalls if s.cause.startswith(out))
        found = [one]
        if one.made.counts[Verb.RUN_ON_HOST]:
            if timeline.step_seconds < self._in_time[0]:
                self._in_time = timeline.step_seconds, in_time(self._graph, one.made, timeline)
            if one.copies is not None:  # late updates need their state later, early ones free their gradients
                found.append(self._with_copies(begun_when_free(self._graph, one.made, timeline)))
        self._take(found)
        return waited > WAITS * timeline.step_seconds and not any(each.is_limited for each in found)

    def _take(self, found: Iterable[_Candidate]) -> float:
        """Note the best of these plans if it is the best of all: those with the least bound first.

        Returns the seconds of the step of the last that may be the best, 0 if none may.
        """
        seconds = 0.0
        for one in sorted(found, key=lambda one: one.least_seconds):
            timeline = one.alone
            if one.copies is not None:
                if one.least_seconds > self._best_seconds:
                    continue
                alone = partial(simulate, self._graph, one.made, self._device, self._seconds)
                _, timeline = one.copies.fastest(timeline, alone)
            self._note(one.made, timeline)
            seconds = timeline.step_seconds
        return seconds

    def _may_spare(self, one: _Candidate, seconds: float) -> bool:
        """Return whether a step of so many seconds would take far less if the disk kept nothing of its forward."""
        if one.copies is None:
            return False
        possible = max(one.alone.step_seconds, one.copies.least_seconds - self._spared_seconds(one.made))
        return possible < (1 - SPARED) * seconds

    def _note(self, made: Schedule, timeline: Timeline) -> None:
        cost = timeline.step_seconds, moved_bytes(self._graph, made)
        if self._best is None or cost < self._best[0]:
            self._best = cost, made, timeline.disk_seconds

    def _spared_seconds(self, made: Schedule) -> float:
        """Return the most that the disk would do less, in seconds, if `made` kept nothing from forward to backward."""
        moved = (self._graph.tensors[t] for t in made.targets(Verb.OFFLOAD))
        away = sum(t.nbytes for t in moved if not t.persistent and t.kind is not TensorKind.GRADIENT)
        nbytes = away + retained_bytes(self._graph, made)
        return self._device.disk_seconds(nbytes, nbytes)


def _with_slower_link(device: Device, share: float) -> Device:
    """Return `device` with a link between its own (`share` 0) and one as slow as its disk (1), if that is slower."""
    out, back = device.offload_bytes_per_second, device.prefetch_bytes_per_second
    return replace(
        device,
        offload_bytes_per_second=out * min(1.0, device.disk_write_bytes_per_second / out) ** share,
        prefetch_bytes_per_second=back * min(1.0, device.disk_read_bytes_per_second / back) ** share,
    )
