"""Sampled memory demand over cuDNN's engines, for the 90 % interval.

cuDNN's choice of engine is unknown. The peak of reserved memory is not monotone in workspaces, since a freed workspace
is a block for activations. So neither the smallest nor the largest workspaces bound the peak. Engines are sampled
instead, for each kind of convolution and each of its shapes. Samples are the same every time, and the same for all
batch sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isqrt
from zlib import crc32

import numpy as np

from overspill.capture.recording.recording import Recording
from overspill.core import Device
from overspill.costs import Interval
from overspill.costs.engines import ENGINES, SHARES, Convolution, Shares, chances
from overspill.costs.scratch import elastic, engines_of

from .demand import Demand

COUNT = 32
FOLLOWERS = 0.75
"""The share of shapes that take the engine of their kind in a job; the others are sampled separately. Assumed."""
_TAIL = 0.05


class EngineSamples:
    """Demands of one recording with other engines of its convolutions.

    They vary the demand `likeliest`.
    """

    def __init__(self, recording: Recording, device: Device, likeliest: Demand) -> None:
        self._likeliest = likeliest
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
            # Convolutions of the same shape take the same engine.
            key = (scratch.family, scratch.sizes, scratch.dtype)
            if key not in shapes:
                kind, found = engines_of(scratch, device.compute_capability)
                shapes[key] = -1 if kind is None else len(options)
                if kind is not None:
                    self._kinds.append(kind)
                    self._shapes.append(Convolution(*scratch.sizes).one_sample)
                    options.append(found)
            if shapes[key] >= 0:
                places.append(place)
                which.append(shapes[key])
        self._options = np.array(options, dtype=np.int64).reshape(-1, len(ENGINES))
        self._places, self._which = np.array(places, dtype=np.int64), np.array(which, dtype=np.int64)

    def demands(self, shares: Shares = SHARES) -> Iterator[Demand]:
        """Yield the demand in each sample; nothing if no convolution has a choice of engines."""
        engines = np.empty((len(self._kinds), COUNT), dtype=np.int64)
        # Of a kind: evenly over the chances, in an order of its own.
        evenly = {kind: (_generator(kind).permutation(COUNT) + 0.5) / COUNT for kind in self._kinds}
        for row, (kind, shape) in enumerate(zip(self._kinds, self._shapes, strict=True)):
            generator = _generator(f"{kind} {shape}")
            share = np.where(generator.random(COUNT) < FOLLOWERS, evenly[kind], generator.random(COUNT))
            engines[row] = np.searchsorted(np.cumsum(chances(kind, shares))[:-1], share, side="right")
        for draw in range(COUNT if self._kinds else 0):
            nbytes = self._likeliest.nbytes.copy()
            nbytes[self._places] = self._options[np.arange(len(engines)), engines[:, draw]][self._which]
            yield replace(self._likeliest, nbytes=nbytes)


def interval(peak: int, drawn: Sequence[int], outside: Interval, unexplained: float) -> Interval:
    """Return the interval that contains nine of ten peaks.

    `peak` is the likeliest one and `drawn` has samples. `outside` is the memory outside the allocator. Their distances
    are independent, and so is `unexplained`, a share of the whole.
    """
    central = peak + outside.central
    least, most = (int(np.quantile([peak, *drawn], tail, method="nearest")) for tail in (_TAIL, 1 - _TAIL))
    beside = int(unexplained * central)

    def together(*distances: int) -> int:
        return isqrt(sum(max(distance, 0) ** 2 for distance in distances))

    below = together(peak - least, outside.central - outside.low, beside)
    above = together(most - peak, outside.high - outside.central, beside)
    return Interval(max(0, central - below), central, central + above)


def _generator(text: str) -> np.random.Generator:
    return np.random.default_rng(crc32(text.encode()))
