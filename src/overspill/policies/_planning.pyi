"""The native part of `decoding.py` (native/planning/)."""

import numpy as np
from numpy.typing import NDArray

from overspill.core import Device, Graph

class Decoder:
    """A program under a budget, to be planned many times; see `overspill.policies.decoding.Decoder`."""

    def __len__(self) -> int: ...
    def decode(
        self, dearer: NDArray[np.float64], first: NDArray[np.bool_]
    ) -> tuple[
        int,
        float,
        int,
        NDArray[np.int32],
        NDArray[np.int32],
        NDArray[np.int32],
        NDArray[np.int32],
        NDArray[np.float64],
    ]: ...
    def as_chosen(self, other: Decoder, chosen: NDArray[np.int32]) -> NDArray[np.uint8]: ...
    def trip_of(self) -> NDArray[np.int32]: ...
    def trips(self) -> NDArray[np.int32]: ...
    def slower(self) -> NDArray[np.int32]: ...
    def ops(self) -> NDArray[np.int32]: ...

class Planner:
    """A graph, a device's link and a budget: makes decoders for programs that recompute one thing or another."""

    def __init__(
        self,
        graph: Graph,
        seconds: NDArray[np.float64],
        forward: NDArray[np.bool_],
        leaves: NDArray[np.bool_],
        chosen: NDArray[np.int32],
        least: NDArray[np.int32],
        whole: bool,
        device: Device,
        budget: int,
    ) -> None: ...
    def fitting(
        self, dropped: NDArray[np.bool_], fleeting: NDArray[np.bool_]
    ) -> tuple[Decoder, NDArray[np.int32]] | None: ...
