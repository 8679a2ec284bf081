"""Which updates of a step run on the host: those of no, some or all parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate

from overspill.core import Device, Graph, Schedule, TensorKind
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.planning.effort import EFFORT, at_effort
from overspill.planning.fastest import fastest
from overspill.planning.on_host import HostUpdates, bytes_of_update, updates_of, updates_of_stored
from overspill.simulate import simulate

DEVICE, HOST, AUTO = UPDATES = ("device", "host", "auto")
"""Where updates run: on the device; on the host, all that can; wherever the step is faster."""
LITTLE = 0.1
"""Share of the effort with which it is found which updates the host should run."""
SHARES = (0.95, 0.8, 0.5)
"""Shares of the bytes of these updates that the host is given instead: those whose gradients are complete first."""
AHEAD = (0, 3)
"""How many of the largest gradients a plan sets memory aside for, so that compute need not wait for them to leave."""

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
        if update == HOST:
            return self._with(self._all)
        sets = dict.fromkeys((self._stored, self._all))
        return self._fastest((self._on_device, *(partial(self._with, updates) for updates in sets), self._in_part))

    def _on_device(self) -> Schedule:
        return self._make(self._graph, self._device, self._budget_bytes, self._seconds)

    @cached_property
    def _stored(self) -> Updates:
        """The updates of parameters whose state a plan for the device has in the store; all if it finds none."""
        try:
            with at_effort(LITTLE * EFFORT.get()):
                return updates_of_stored(self._graph, self._on_device())
        except InfeasibleBudgetError:
            return self._all

    def _with(self, updates: Updates, aheads: Sequence[int] = AHEAD) -> Schedule:
        """Return the fastest plan with these updates on the host, over the gradients that it has memory for ahead."""
        if not updates:
            return self._on_device()
        host = HostUpdates(self._graph, updates, self._device, self._seconds)
        largest = sorted((t.nbytes for t in self._graph.tensors if t.kind is TensorKind.GRADIENT), reverse=True)

        def made(ahead: int) -> Schedule:
            planned_bytes = None if self._budget_bytes is None else max(1, self._budget_bytes - sum(largest[:ahead]))
            planned = self._make(host.rest, self._device, planned_bytes, host.seconds)
            return host.schedule(planned, self._budget_bytes)

        return self._fastest(partial(made, ahead) for ahead in aheads)

    def _in_part(self) -> Schedule:
        """Return the plan with the best share of the updates on the host."""
        chosen = [self._first(share) for share in SHARES]
        seconds: dict[Updates, float] = {}
        with at_effort(LITTLE * EFFORT.get()):
            for updates in dict.fromkeys(chosen):
                for made in self._fitting((partial(self._with, updates, AHEAD[:1]),), needed=False):
                    seconds[updates] = simulate(self._graph, made, self._device, self._seconds).step_seconds
        return self._with(min(seconds, key=seconds.__getitem__, default=self._stored))

    def _first(self, share: float) -> Updates:
        """Return the first of the updates that have a share of their bytes."""
        sizes = [bytes_of_update(self._graph, self._graph.ops[op]) for op in self._stored]
        return tuple(
            op for op, sofar in zip(self._stored, accumulate(sizes), strict=True) if sofar <= share * sum(sizes)
        )

    def _fastest(self, plans: Iterable[Callable[[], Schedule]]) -> Schedule:
        best = fastest(self._graph, self._device, self._seconds, self._fitting(plans), self._budget_bytes)
        assert best is not None
        return best

    def _fitting(self, plans: Iterable[Callable[[], Schedule]], *, needed: bool = True) -> Iterator[Schedule]:
        """Yield the plans that fit. Raises the InfeasibleBudgetError of the lowest floor if one is `needed`."""
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
        if needed and not found:
            raise min(errors, key=lambda error: error.floor_bytes)
