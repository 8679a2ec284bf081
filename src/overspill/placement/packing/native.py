"""The Python face of the native solvers (native/packing/), which do what their Python twins do, many times as fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overspill.core.errors import RequestError

from .problem import Integers

try:
    from . import _packing
except ImportError:  # the source tree without a build: the Python twins do the same
    AVAILABLE = False
else:
    AVAILABLE = True

if TYPE_CHECKING:
    from ._packing import BackjumpSearch, ExactSearch, SkylinePacker


def chosen(native: bool | None) -> bool:
    """Whether the native code is to run: as asked, by default where it is built.

    Raises RequestError where it is asked for and not built.
    """
    if native and not AVAILABLE:
        raise RequestError("the native solvers are not built; install overspill, or ask for the Python twin")
    return AVAILABLE if native is None else native


def skyline_packer(start: Integers, end: Integers, nbytes: Integers, alignment: Integers) -> SkylinePacker:
    """The native twin of `skyline.TwinPacker`."""
    return _packing.SkylinePacker(start, end, nbytes, alignment)


def exact_search() -> type[ExactSearch]:
    """The native twin of `exact_twin.TwinSearch`."""
    return _packing.ExactSearch


def backjump_search(sections: int, start: Integers, end: Integers, size: Integers, below: Integers) -> BackjumpSearch:
    """The native twin of `backjump_twin.TwinBackjumpSearch`."""
    return _packing.BackjumpSearch(sections, start, end, size, below)


def greedy(
    nbytes: Integers,
    alignment: Integers,
    pinned: Integers,
    piece_first: Integers,
    piece_start: Integers,
    piece_end: Integers,
    order: Integers,
    *,
    best_fit: bool,
) -> Integers:
    """The native twin of `greedy.place`."""
    return _packing.greedy(nbytes, alignment, pinned, piece_first, piece_start, piece_end, order, best_fit)
