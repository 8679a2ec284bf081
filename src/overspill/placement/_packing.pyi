"""The Python face of the native offline solvers (native/packing/module.cpp)."""

import numpy as np
from numpy.typing import NDArray

class ExactSearch:
    """The native twin of overspill.placement.packing.exact_twin.TwinSearch."""

    def __init__(
        self,
        sections: int,
        piece_first: NDArray[np.int64],
        piece_start: NDArray[np.int64],
        piece_end: NDArray[np.int64],
        size: NDArray[np.int64],
        alignment: NDArray[np.int64],
        pinned: NDArray[np.int64],
        below: NDArray[np.int64],
        lifetime: NDArray[np.int64],
    ) -> None: ...
    def attempt(
        self,
        highest: NDArray[np.int64],
        ceiling: NDArray[np.int64],
        keys: str,
        noise: NDArray[np.float64],
        live: bool,
        node_limit: int,
        seconds: float,
    ) -> tuple[int, int, list[int]]: ...
