"""Algorithms of a convolution: workspace and relative speed of each.

A convolution has an input map X (N x C x H x W), a weight W (K x C/groups x R x S) and an output map Y (N x K x P x Q).
All are read from the op's tensors; the stride follows from their sizes. A backward pass forms two such products, for
the gradients of X and of W, of the same sizes.

Known limit: dilation leaves no trace in the sizes and is not seen.

Formulas of the algorithms (cuDNN: Chetlur et al. 2014; Winograd: Lavin and Gray 2016, §4; vDNN footnote 2):

    algorithm               workspace                                          multiplications, of a direct product's
    implicit-gemm           none: products are formed on the fly               all
    implicit-precomp-gemm   the offset of every tap, C R S integers            all
    gemm                    one image lowered to a matrix, C R S x P Q         all
    winograd                X, Y and W in tiles of 4 x 4 that make 2 x 2       16 of 36
    fft-16, fft-32          X, Y and W in the frequency domain, in tiles       4 x 544 of 900 x 9 (fft-32 of a
                            of 32 x 32 that make (33-R) x (33-S): 32 x 17      3 x 3 kernel)
                            complex numbers each; the same with 16

Winograd is for 3 x 3 kernels, FFT for any up to half of its tile, both for stride 1 and ungrouped convolutions.

Figures calibrated on a Titan X with those of vDNN (MICRO'16):

    TRANSFORM_SHARE   of memory bandwidth that transforms reach: so that VGG-16's layers of 64 channels take no FFT and
                      those of 128 do, which gives the 28 GB of Fig. 1 with batch 256 and 15 GB with 128
    IMPLICIT_SHARE    of implicit-precomp-gemm's speed that implicit-gemm reaches: 55 % and 58 % lost (Fig. 14)
    LOWERED_SHARE     the same for gemm, assumed: its buffer goes through memory twice

The device's `efficiency.conv` is the share of its FLOP/s that implicit-precomp-gemm reaches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from math import ceil, prod

from overspill.core import Algorithm, Device, Graph, LayerType, Op, Tensor, TensorKind

from .precision import peak_flops_per_second

TRANSFORM_SHARE = 0.2
IMPLICIT_SHARE = 0.55
LOWERED_SHARE = 0.8

FORWARD, BACKWARD = "convolution", "convolution_backward"
WINOGRAD_SINCE = 5
"""The first cuDNN release with Winograd; vDNN has release 4 (§IV-A)."""

_INDEX_BYTES = 4
_FFT_EDGES = (16, 32)


@dataclass(frozen=True)
class Sizes:
    """One convolution of `n` images, in elements."""

    n: int
    c: int
    k: int
    image: tuple[int, ...]
    output: tuple[int, ...]
    kernel: tuple[int, ...]
    groups: int
    item_bytes: int
    passes: int
    """How many products of this size make the op."""

    @property
    def flops(self) -> int:
        """FLOPs of one direct product."""
        return 2 * self.n * self.k * prod(self.output) * self.c // self.groups * prod(self.kernel)

    @property
    def map_bytes(self) -> tuple[int, int, int]:
        """Bytes of X, Y and W."""
        x, y = self.n * self.c * prod(self.image), self.n * self.k * prod(self.output)
        w = self.k * self.c // self.groups * prod(self.kernel)
        return x * self.item_bytes, y * self.item_bytes, w * self.item_bytes

    @property
    def stride(self) -> int:
        """The stride from `image` to `output`, if the padding is half of what keeps the size (assumed)."""
        height, made, taps = self.image[0], self.output[0], self.kernel[0]
        return max(1, round((height - taps + (taps - 1) / 2) / (made - 1))) if made > 1 else 1

    @property
    def transforms(self) -> bool:
        """Whether Winograd and FFT apply: planes, dense, stride 1."""
        return len(self.kernel) == 2 and self.groups == 1 and self.stride == 1 and min(self.kernel) > 1


@dataclass(frozen=True)
class _Cost:
    name: str
    workspace_bytes: int
    seconds: float


def with_algorithms(graph: Graph, device: Device, *, cudnn: int = 7) -> Graph:
    """Return `graph` with the algorithms that a schedule may choose from, for each convolution whose sizes can be read.

    They are those that release `cudnn` offers. None of them is both slower and larger than another. The fastest is
    first, the last takes no workspace.
    """
    return replace(graph, ops=tuple(_with_algorithms(graph, op, device, cudnn) for op in graph.ops))


def fastest_workspace_bytes(sizes: Sizes, device: Device, limit_bytes: int, *, cudnn: int = 7) -> int:
    """Return the workspace bytes of the fastest algorithm within `limit_bytes`, as a framework finds by trying all."""
    rate = peak_flops_per_second(device, "float32", LayerType.CONV) * device.efficiency.get(LayerType.CONV, 1.0)
    costs = [cost for cost in _costs(sizes, rate, device, cudnn) if cost.workspace_bytes <= limit_bytes]
    return min(costs, key=lambda cost: (cost.seconds, cost.workspace_bytes)).workspace_bytes


def workspaces(sizes: Sizes, device: Device, *, cudnn: int = 7) -> tuple[int, ...]:
    """Return the workspace bytes of every possible algorithm, in the order of trial."""
    return tuple(cost.workspace_bytes for cost in _costs(sizes, 1.0, device, cudnn))


def fastest_seconds(graph: Graph, op: Op, device: Device) -> float | None:
    """Return the seconds of the op's first algorithm, without the launch; None if it is no algorithm of this file."""
    sizes = sizes_of(graph, op) if op.algorithms else None
    if sizes is None:
        return None
    costs = {cost.name: cost.seconds for cost in _costs(sizes, _rate(graph, op, device), device, WINOGRAD_SINCE)}
    return costs.get(op.algorithms[0].name)


def sizes_of(graph: Graph, op: Op) -> Sizes | None:
    """Return the sizes of the op's convolution; None if they do not follow from its tensors."""
    if op.name == FORWARD:
        made, read, passes = op.writes[:1], op.reads, 1
    elif op.name == BACKWARD:
        passes = sum(len(graph.tensors[t].shape) > 1 for t in op.writes)
        made, read = (), op.reads
    else:
        return None
    # Try which tensors are input, weight and output; the FLOPs confirm it.
    maps = [graph.tensors[t] for t in (*made, *read) if len(graph.tensors[t].shape) > 2]
    for x, w, y in permutations(maps, 3):
        found = _fit(x, w, y, passes)
        if found is not None and found.flops * passes == op.flops and (not made or made[0] in (x.id, y.id)):
            return found
    return None


def _fit(x: Tensor, w: Tensor, y: Tensor, passes: int) -> Sizes | None:
    """Return the convolution of `x` with `w` to `y`, if the shapes agree.

    A transposed convolution makes X of Y.
    """
    if not len(x.shape) == len(w.shape) == len(y.shape) or x.shape[0] != y.shape[0] or w.shape[0] != y.shape[1]:
        return None
    if x.shape[1] % w.shape[1] or TensorKind.PARAMETER in (x.kind, y.kind):
        return None
    item_bytes = max(1, y.nbytes // max(1, prod(y.shape)))
    groups = x.shape[1] // w.shape[1]
    return Sizes(x.shape[0], x.shape[1], y.shape[1], x.shape[2:], y.shape[2:], w.shape[2:], groups, item_bytes, passes)


def _with_algorithms(graph: Graph, op: Op, device: Device, cudnn: int) -> Op:
    sizes = sizes_of(graph, op)
    if sizes is None:
        return op
    # Keep an algorithm only if it needs less workspace than all faster ones.
    menu: list[_Cost] = []
    for cost in sorted(
        _costs(sizes, _rate(graph, op, device), device, cudnn), key=lambda c: (c.seconds, c.workspace_bytes)
    ):
        if not menu or cost.workspace_bytes < menu[-1].workspace_bytes:
            menu.append(cost)
    launch = device.op_overhead_seconds
    algorithms = tuple(
        Algorithm(cost.name, cost.workspace_bytes, (launch + cost.seconds) / (launch + menu[0].seconds))
        for cost in menu
    )
    return replace(op, workspace_bytes=algorithms[0].workspace_bytes, workspaces=(), algorithms=algorithms)


def _rate(graph: Graph, op: Op, device: Device) -> float:
    """Return the FLOP/s that implicit-precomp-gemm reaches."""
    dtype = graph.tensors[op.writes[0]].dtype
    peak = peak_flops_per_second(device, dtype, op.layer_type)
    return peak * device.efficiency.get(op.layer_type, 1.0)


def _costs(sizes: Sizes, rate: float, device: Device, cudnn: int) -> list[_Cost]:
    """Return every possible algorithm, in seconds of all its passes."""
    bandwidth = device.memory_bytes_per_second
    x, y, w = sizes.map_bytes
    taps = sizes.c // sizes.groups * prod(sizes.kernel)
    through = (x + y + w) / bandwidth
    direct = sizes.flops / rate

    def cost(name: str, workspace_bytes: int, seconds: float) -> _Cost:
        return _Cost(name, workspace_bytes, sizes.passes * max(seconds, through))

    # By matrix products.
    lowered = taps * prod(sizes.output) * sizes.item_bytes
    costs = [
        cost("implicit-gemm", 0, direct / IMPLICIT_SHARE),
        cost("implicit-precomp-gemm", taps * _INDEX_BYTES, direct),
        cost("gemm", lowered, direct / LOWERED_SHARE + 2 * lowered * sizes.n / bandwidth),
    ]
    if not sizes.transforms:
        return costs

    def transformed(name: str, workspace_bytes: int, share: float) -> _Cost:
        moved = x + y + w + workspace_bytes
        return cost(name, workspace_bytes, share * direct + moved / (TRANSFORM_SHARE * bandwidth))

    # Winograd for 3 x 3 kernels.
    if sizes.kernel == (3, 3) and cudnn >= WINOGRAD_SINCE:
        tiles = sizes.n * prod(ceil(edge / 2) for edge in sizes.output)
        points = tiles * (sizes.c + sizes.k) + sizes.c * sizes.k
        share = 16 * tiles / (9 * sizes.n * prod(sizes.output))
        costs.append(transformed("winograd", 16 * points * sizes.item_bytes, share))
    # FFT by tile size, where the kernel leaves enough of a tile.
    for edge in _FFT_EDGES:
        made = [edge + 1 - taps for taps in sizes.kernel]
        if min(made) < edge / 2:
            continue
        bins = edge * (edge // 2 + 1)  # a real signal's spectrum is symmetric
        tiles = sizes.n * prod(ceil(length / step) for length, step in zip(sizes.output, made, strict=True))
        points = tiles * (sizes.c + sizes.k) + sizes.c * sizes.k
        share = 4 * bins * tiles / (prod(sizes.kernel) * sizes.n * prod(sizes.output))
        costs.append(transformed(f"fft-{edge}", 2 * bins * points * sizes.item_bytes, share))
    return costs
