"""Which updates of a step run on the host: those of no, some or all parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from overspill.core import Device, Graph, Schedule, Stream, TensorKind, Timeline, Verb
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.planning.fastest import fastest
from overspill.planning.on_host import HostUpdates, begun_when_free, updates_of, updates_of_stored
from overspill.planning.tiers import with_tiers
from overspill.simulate import simulate

DEVICE, HOST, AUTO = UPDATES = ("device", "host", "auto")
"""Where updates run: on the device; on the host, all that can; wherever the step is faster."""
AHEAD = (0, 3)
"""How many of the largest gradients a plan sets memory aside for, so that compute need not wait for them to leave."""

HOST_WAIT = f"{Stream.HOST_UPDATE} of"
"""How the cause of a stall begins that waits for an update on the host."""

Make = Callable[[Graph, Device, int | None, tuple[float, ...]], Schedule]
Updates = tuple[int, ...]


class PlansOnHost:
    """Plans by `make` of a whole step within a budget, with updates on the host."""

    def __init__(
        self, make: Make, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]
    ) -> None:
        """Raise RequestError if the host can run no update."""
        self._make, self._graph, self._device, self._seconds = make, graph, device, seconds
        self._budget_bytes = budget_bytes
        self._all = updates_of(graph)
        if not device.host_update_bytes_per_second:
            raise RequestError(
                f"update=: how fast the host of {device.name} updates weights is unknown; give its device file a "
                "host_update_bytes_per_second, which `overspill calibrate` measures"
            )
        if not self._all:
            raise RequestError(
                f"update=: the host can run no update of {graph.name}; leave it out, or take an optimizer whose state "
                "may leave the device"
            )

    def best(self, update: str) -> Schedule:
        """Return the schedule for `update`, one of UPDATES. Raises InfeasibleBudgetError."""
        return self._with(self._all) if update == HOST else self._fastest(self._ways())

    def _ways(self) -> Iterator[Callable[[], Schedule]]:
        """Yield plans: on the device, on the host, and with less on the host than in the best of these."""
        found: list[Schedule] = []

        def noted(make: Callable[[], Schedule]) -> Schedule:
            found.append(make())
            return found[-1]

        yield partial(noted, self._on_device)
        stored = updates_of_stored(self._graph, found[0]) if found else self._all
        for updates in dict.fromkeys((self._all, stored or self._all)):
            yield partial(noted, partial(self._with, updates))
        on_host = [made for made in found if made.counts[Verb.RUN_ON_HOST]]
        if on_host and (fewer := self._in_time(min(on_host, key=self._seconds_of))):
            yield partial(self._with, fewer)

    def _on_device(self) -> Schedule:
        return self._make(self._graph, self._device, self._budget_bytes, self._seconds)

    def _with(self, updates: Updates) -> Schedule:
        """Return the faster plan with these updates on the host, with and without memory for gradients ahead."""
        host = HostUpdates(self._graph, updates, self._device, self._seconds)
        largest = sorted((t.nbytes for t in self._graph.tensors if t.kind is TensorKind.GRADIENT), reverse=True)

        def made(ahead: int) -> Schedule:
            planned_bytes = None if self._budget_bytes is None else max(1, self._budget_bytes - sum(largest[:ahead]))
            planned = self._make(host.rest, self._device, planned_bytes, host.seconds)
            return host.schedule(planned, self._budget_bytes)

        return self._fastest(partial(made, ahead) for ahead in AHEAD)

    def _in_time(self, made: Schedule) -> Updates:
        """Return the updates of a plan that the host ends in the step, and that the next step need not wait for."""
        timeline = simulate(self._graph, made, self._device, self._seconds)
        waited = {made.instructions[stall.instruction].target for stall in timeline.stalls if HOST_WAIT in stall.cause}
        ends = {e.target: e.end_seconds for e in timeline.events if e.verb is Verb.RUN_ON_HOST}
        return tuple(
            op
            for op in self._all
            if ends.get(op, math.inf) <= timeline.step_seconds and waited.isdisjoint(self._graph.ops[op].writes)
        )

    def _seconds_of(self, made: Schedule) -> float:
        return self._timeline(made).step_seconds

    def _timeline(self, made: Schedule) -> Timeline:
        """Return the timeline of a plan, with the disk below the store if there is one."""
        timeline = partial(simulate, self._graph, device=self._device, seconds=self._seconds)
        if self._device.host_bytes:
            made = begun_when_free(self._graph, made, timeline(made))
        _, found = with_tiers(self._graph, made, self._device, lambda tiers: timeline(made, tiers=tiers))
        return found

    def _fastest(self, plans: Iterable[Callable[[], Schedule]]) -> Schedule:
        best = fastest(
            self._graph, self._device, self._seconds, self._fitting(plans), self._budget_bytes, self._timeline
        )
        assert best is not None
        return best

    def _fitting(self, plans: Iterable[Callable[[], Schedule]]) -> Iterator[Schedule]:
        """Yield the plans that fit. Raises the InfeasibleBudgetError of the lowest floor if none does."""
        errors: list[InfeasibleBudgetError] = []
        found = False
        for plan in plans:
            try:
                made = plan()
            except InfeasibleBudgetError as error:
                errors.append(error.with_traceback(None))  # whose frames would live on
            else:
                found = True
                yield made
        if not found:
            raise min(errors, key=lambda error: error.floor_bytes)
