"""The native search of `auto` (native/search/)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device
from overspill.core import Graph as CoreGraph

class TimedPlan:
    """A plan: the step takes `seconds`, moves `moved_bytes` to the store and has `peak_bytes` at most on the device.

    `chosen` are the candidates taken, `swaps` those of them that move a tensor, each released and issued before the
    steps that `release` and `issue` name.
    """

    seconds: float
    moved_bytes: int
    peak_bytes: int
    chosen: NDArray[np.int32]
    swaps: NDArray[np.int32]
    release: NDArray[np.int32]
    issue: NDArray[np.int32]

class ListScheduler:
    """The candidates of a program under a budget: parts of swaps, then slower algorithms."""

    def __len__(self) -> int:
        """How many candidates there are."""
    def swaps(self) -> NDArray[np.int32]:
        """For each swap its tensor, the steps at the ends of its gap, and that before which its copy may start."""
    def slower(self) -> NDArray[np.int32]:
        """For each slower algorithm, which are the last candidates, its op and its number."""

class Graph:
    """A graph with what its ops take; `leaves`: the tensors that are worth a transfer; `least`: by op its algorithm."""

    def __init__(
        self,
        graph: CoreGraph,
        seconds: NDArray[np.float64],
        forward: NDArray[np.bool_],
        leaves: NDArray[np.bool_],
        least: NDArray[np.int32],
        whole: bool,
    ) -> None: ...

class Planner:
    """A graph with algorithms, a device's link and a budget: what an annealing plans for."""

    def __init__(self, graph: Graph, chosen: NDArray[np.int32], device: Device, budget: int) -> None: ...

class RematGroups:
    """See `overspill.policies.auto.remat_groups.RematGroups`."""

    def __init__(
        self, tensors: Sequence[Sequence[int]], alike: Sequence[Sequence[int]], near: Sequence[int]
    ) -> None: ...

class Attempt:
    """A plan that fits, what it recomputes, what of that is dropped after each use, and what else is kept for it."""

    recompute: NDArray[np.int32]
    drop_after_use: NDArray[np.int32]
    kept: NDArray[np.int32]
    scheduler: ListScheduler
    plan: TimedPlan

class Annealing:
    """Simulated annealing from plan to plan, which keeps the best."""

    def __init__(self, planner: Planner, groups: RematGroups) -> None: ...
    @property
    def best(self) -> Attempt | None:
        """The best plan so far."""
    def begin(self, recompute: NDArray[np.bool_], kept: NDArray[np.bool_]) -> float:
        """Seconds of the plan that recomputes and keeps these tensors (one flag a tensor), infinite if it does not fit."""
    def anneal(
        self,
        attempts: int,
        evaluations: int,
        perturbation_rate: float,
        temperature_seconds: float,
        target_seconds: float,
    ) -> None:
        """Make `attempts` changes of the best plan, fewer where candidates were looked at `evaluations` times before.

        It ends early with a plan that takes `target_seconds`. Early changes may cost about `temperature_seconds`.
        Control-C ends it.
        """
