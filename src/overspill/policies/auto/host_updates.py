"""Which plan of a step is fastest: updates on the device, on the host or some on each; for its link or a slower one.

Of what cannot be faster than the best so far no plan is searched, and no stays on the disk are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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
        if not self._device.host_update_bytes_per_second:
            raise RequestError(
                f"update=: how fast the host of {self._device.name} updates weights is unknown; give its device file a "
                "host_update_bytes_per_second, which `overspill calibrate` measures"
            )
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
        for linked in (device, *slower):
            _, limited = self._weigh(partial(self._make, self._graph, linked, self._budget_bytes, self._seconds))
            if not limited:
                break

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
        waits, _ = self._weigh(partial(made, 0))
        if waits:
            self._weigh(partial(made, AHEAD))

    def _weigh(self, plan: Callable[[], Schedule]) -> tuple[bool, bool]:
        """Make a plan and keep it if it is the best; return whether copies out are waited for, and the disk limits it.

        What is returned depends on no other plan.
        """
        try:
            made = plan()
        except InfeasibleBudgetError as error:
            self._errors.append(error.with_traceback(None))  # whose frames would live on
            return False, False
        timeline = simulate(self._graph, made, self._device, self._seconds)
        if self._budget_bytes is not None and timeline.peak_bytes > self._budget_bytes:
            return False, False
        out = f"{Stream.OFFLOAD} of"
        waited = sum(s.end_seconds - s.start_seconds for s in timeline.stalls if s.cause.startswith(out))
        waits = waited > WAITS * timeline.step_seconds
        if made.counts[Verb.RUN_ON_HOST] and timeline.step_seconds < self._in_time[0]:
            self._in_time = timeline.step_seconds, in_time(self._graph, made, timeline)
        if not self._device.host_bytes:
            self._note(made, timeline)
            return waits, False
        found = [self._with_disk(made, timeline)]
        if made.counts[Verb.RUN_ON_HOST]:  # late updates need their state later, early ones free their gradients
            later = begun_when_free(self._graph, made, timeline)
            found.append(self._with_disk(later, simulate(self._graph, later, self._device, self._seconds)))
        return waits and not any(limits for limits, _ in found), any(spares for _, spares in found)

    def _with_disk(self, made: Schedule, alone: Timeline) -> tuple[bool, bool]:
        """Note the plan with its disk if it may be the best; return whether the disk limits it, and may do far less."""
        copies = StoredCopies(self._graph, made, self._device)
        limits = copies.least_seconds >= alone.step_seconds
        if max(alone.step_seconds, copies.least_seconds) > self._best_seconds:
            return limits, False
        _, timeline = copies.fastest(alone, partial(simulate, self._graph, made, self._device, self._seconds))
        self._note(made, timeline)
        possible = max(alone.step_seconds, copies.least_seconds - self._spared_seconds(made))
        return limits, possible < (1 - SPARED) * timeline.step_seconds

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
