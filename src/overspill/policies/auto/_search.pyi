"""The native search of `auto` (native/search/)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device
from overspill.core import Graph as CoreGraph

class TimedPlan:
    """A plan: the step takes `seconds`, moves `moved_bytes` to the store and has `peak_bytes` at most on the device.

    All arrays hold numbers, of candidates or of steps.
    """

    seconds: float
    moved_bytes: int
    peak_bytes: int
    chosen: NDArray[np.int32]
    """The candidates taken, `[chosen]`."""
    swaps: NDArray[np.int32]
    """Those of `chosen` that move a tensor, `[swaps]`."""
    release: NDArray[np.int32]
    """The step before which each swap is released, `[swaps]`."""
    issue: NDArray[np.int32]
    """The step before which each swap's way back is issued, `[swaps]`."""

class ListScheduler:
    """The candidates of a program under a budget: parts of swaps, then slower algorithms."""

    def __len__(self) -> int:
        """Return the number of candidates."""
    def swaps(self) -> NDArray[np.int32]:
        """Return for each swap its tensor, the steps at the ends of its gap, and the first step to start before."""
    def slower(self) -> NDArray[np.int32]:
        """Return for each slower algorithm its op and its number; they are the last candidates."""

class Graph:
    """A graph with the seconds of its ops.

    `leaves` are the tensors that are worth a transfer, `[tensors]`. `least` is the algorithm of least workspace by op,
    `[ops]`.
    """

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
    """A graph with algorithms, a device's link and a budget, for which an annealing plans."""

    def __init__(self, graph: Graph, chosen: NDArray[np.int32], device: Device, budget: int) -> None: ...

class RematGroups:
    """See `overspill.policies.auto.remat_groups.RematGroups`."""

    def __init__(
        self, tensors: Sequence[Sequence[int]], alike: Sequence[Sequence[int]], near: Sequence[int]
    ) -> None: ...

class Attempt:
    """A plan that fits."""

    recompute: NDArray[np.int32]
    """The tensors that it recomputes."""
    drop_after_use: NDArray[np.int32]
    """Those of `recompute` that it drops after each use."""
    kept: NDArray[np.int32]
    """Other tensors that it keeps for recomputations."""
    scheduler: ListScheduler
    plan: TimedPlan

class Annealing:
    """Simulated annealing from plan to plan, which keeps the best."""

    def __init__(self, planner: Planner, groups: RematGroups) -> None: ...
    @property
    def best(self) -> Attempt | None:
        """The best plan so far."""
    def begin(self, recompute: NDArray[np.bool_], kept: NDArray[np.bool_]) -> float:
        """Return the seconds of the plan that recomputes and keeps these tensors; infinite if it does not fit.

        Both arrays have one flag for each tensor, `[tensors]`.
        """
    def anneal(
        self,
        attempts: int,
        evaluations: int,
        perturbation_rate: float,
        temperature_seconds: float,
        target_seconds: float,
    ) -> None:
        """Make `attempts` changes of the best plan, fewer once candidates were evaluated `evaluations` times.

        It ends early with a plan that takes `target_seconds`. Early changes may cost about `temperature_seconds`.
        Control-C ends it.
        """
