"""The native part of `search.py` (native/search/)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device
from overspill.core import Graph as CoreGraph

class Decoded:
    """A plan: the step takes `seconds`, moves `moved_bytes` to the store and has `peak_bytes` at most on the device.

    `chosen` are the candidates taken, `trips` those made, each released and issued before the steps that `release` and
    `issue` name. `lost` are seconds: by tensor those that compute waited for it, then by op those that it took longer.
    """

    seconds: float
    moved_bytes: int
    peak_bytes: int
    chosen: NDArray[np.int32]
    trips: NDArray[np.int32]
    release: NDArray[np.int32]
    issue: NDArray[np.int32]
    lost: NDArray[np.float64]

class Decoder:
    """A program under a budget, to be planned many times with other priorities of the candidates."""

    def __len__(self) -> int:
        """How many candidates there are."""
    def decode(self, dearer: NDArray[np.float64], first: NDArray[np.bool_]) -> Decoded:
        """The plan that takes candidates `first` before all others.

        `dearer` are seconds that trips cost more, by tensor, and then slower algorithms, by op.
        """
    def among(self, gaps: NDArray[np.int64]) -> NDArray[np.int32]:
        """The candidates that are parts of trips in these gaps, given by their keys in order."""
    def as_chosen(self, other: Decoder, plan: Decoded) -> NDArray[np.int32]:
        """The candidates that are the same parts of the same trips as those that a plan of another decoder takes."""
    def trips(self) -> NDArray[np.int32]:
        """For each trip its tensor, the steps at the ends of its gap, and that before which its copy may start."""
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
    """A graph with algorithms, a device's link and a budget: makes decoders for programs that recompute this or that."""

    def __init__(self, graph: Graph, chosen: NDArray[np.int32], device: Device, budget: int) -> None: ...
    def fitting(
        self, recompute: NDArray[np.bool_], fleeting: NDArray[np.bool_]
    ) -> tuple[Decoder, NDArray[np.int32]] | None:
        """A decoder of the program that recomputes these, less those for which there is no room where they are made again.

        With it, what is left of `recompute`. None where no program fits that recomputes some of them.
        """

class Units:
    """See `overspill.policies.auto.remat_groups.Units`."""

    def __init__(
        self,
        tensors: Sequence[Sequence[int]],
        alike: Sequence[Sequence[int]],
        near: Sequence[int],
    ) -> None: ...

class Attempt:
    """A plan that fits, and what it recomputes."""

    recompute: NDArray[np.int32]
    fleeting: NDArray[np.int32]
    decoder: Decoder
    plan: Decoded

    def seconds_on(self, device: Device) -> float:
        """What the step takes on a device with another link."""

class Walk:
    """The search's walk from plan to plan, which keeps the best; see `overspill.policies.walk.Walk`."""

    looks: int
    """How often candidates were looked at in all attempts, which is what takes time."""

    def __init__(self, planner: Planner, units: Units) -> None: ...
    @property
    def best(self) -> Attempt | None:
        """The best plan so far."""
    def begin(self, recompute: NDArray[np.bool_], away: NDArray[np.int64]) -> None:
        """Try what recomputes these tensors and first makes the trips in these gaps, and repair it."""
    def go_on(self, most: int, until: int, steering: float, warm: float, aim: float) -> None:
        """Make `most` attempts near the best plan, or as many as there are before `looks` are `until`, or one takes `aim` seconds.

        Early changes may cost about `warm` seconds. Control-C ends it.
        """
