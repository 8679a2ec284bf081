"""What a job may ask for, given that nobody knows which engine cuDNN takes: draws of them, and how far they lie apart.

The peak of reserved memory is not monotone in workspaces: one that was freed is a block for activations. So neither the
least nor the most of them bounds it, and the engines are drawn instead, for each kind of convolution and each of its
shapes. Draws are the same every time, and the same for all batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import isqrt
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from overspill.capture.recording.recording import Recording
from overspill.core import Device
from overspill.costs import Interval
from overspill.costs.engines import SHARES, Convolution, Shares, kind_of, workspaces
from overspill.costs.scratch import ITEM_BYTES, elastic

from .demand import Demand

COUNT = 32
FOLLOWERS = 0.75
"""The share of shapes that take what their kind takes in a job; the others are drawn by themselves. Assumed."""
_TAIL = 0.05


class Draws:
    """Demands of one recording that differ in the engines of its convolutions; `likeliest` is what it asks else.

    `engines` is how many kinds of convolution there are to choose for; where it is 0, all demands are the same.
    """

    def __init__(self, recording: Recording, device: Device, likeliest: Demand, shares: Shares = SHARES) -> None:
        self.likeliest = likeliest
        shapes: dict[tuple[object, ...], int] = {}
        self._kinds: list[str] = []
        self._shapes: list[tuple[int, ...]] = []
        options: list[tuple[int, ...]] = []
        places: list[int] = []
        which: list[int] = []
        for place, allocation in enumerate(recording.allocations):
            scratch = allocation.scratch
            if scratch is None or not elastic(scratch) or scratch.family == "conv_trial":
                continue
            key = (scratch.family, scratch.sizes, scratch.dtype)
            if key not in shapes:
                convolution = Convolution(*scratch.sizes)
                kind = kind_of(scratch.family, convolution, scratch.dtype, device.compute_capability)
                shapes[key] = -1 if kind is None else len(options)
                if kind is not None:
                    self._kinds.append(kind)
                    self._shapes.append(convolution.one_sample)
                    item = ITEM_BYTES.get(scratch.dtype, 4)
                    options.append(workspaces(scratch.family, convolution, item, device.compute_capability))
            if shapes[key] >= 0:
                places.append(place)
                which.append(shapes[key])
        self._shares = shares
        self._options = np.array(options, dtype=np.int64).reshape(len(options), -1)
        self._places, self._which = np.array(places, dtype=np.int64), np.array(which, dtype=np.int64)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of convolution of which the engine is not known, in the order of their first use."""
        return tuple(dict.fromkeys(self._kinds))

    @property
    def count(self) -> int:
        """How many different demands there can be, COUNT at most."""
        return COUNT if self._kinds else 1

    @cached_property
    def of_kinds(self) -> dict[str, NDArray[np.int64]]:
        """The engine, by position, that each draw has for a kind: evenly over the shares, in an order of its own."""
        return {
            kind: self._engine(kind, (_generator(kind).permutation(COUNT) + 0.5) / COUNT)
            for kind in self.kinds
        }  # fmt: skip

    @cached_property
    def _engines(self) -> NDArray[np.int64]:
        """The engine of each shape in each draw."""
        made = np.empty((len(self._kinds), COUNT), dtype=np.int64)
        for row, (kind, shape) in enumerate(zip(self._kinds, self._shapes, strict=True)):
            generator = _generator(f"{kind} {shape}")
            follows = generator.random(COUNT) < FOLLOWERS
            made[row] = np.where(follows, self.of_kinds[kind], self._engine(kind, generator.random(COUNT)))
        return made

    def _engine(self, kind: str, share: NDArray[np.float64]) -> NDArray[np.int64]:
        limits = np.cumsum(self._shares[kind])
        return np.searchsorted(limits / limits[-1], share, side="right")

    def demand(self, draw: int) -> Demand:
        """What the job asks for with the engines of a draw."""
        if not self._kinds:
            return self.likeliest
        nbytes = self.likeliest.nbytes.copy()
        taken = self._options[np.arange(len(self._kinds)), self._engines[:, draw]]
        nbytes[self._places] = taken[self._which]
        return replace(self.likeliest, nbytes=nbytes)


def typical(peaks: Sequence[int]) -> int:
    """The position of the median of `peaks`, the lower of two."""
    return int(np.argsort(np.array(peaks), kind="stable")[(len(peaks) - 1) // 2])


def interval(peaks: Sequence[int], outside: Interval, unexplained: float) -> Interval:
    """The interval that nine of ten jobs lie in, given draws of a job's peak and what it takes outside the allocator.

    Their distances are independent, and so is `unexplained`, a share of the whole.
    """
    peak = peaks[typical(peaks)]
    central = peak + outside.central
    least, most = (int(np.quantile(peaks, tail, method="nearest")) for tail in (_TAIL, 1 - _TAIL))
    beside = int(unexplained * central)

    def together(*distances: int) -> int:
        return isqrt(sum(distance * distance for distance in distances))

    below = together(peak - least, outside.central - outside.low, beside)
    above = together(most - peak, outside.high - outside.central, beside)
    return Interval(max(0, central - below), central, central + above)


def _generator(text: str) -> np.random.Generator:
    return np.random.default_rng(crc32(text.encode()))
