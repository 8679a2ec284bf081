"""cuDNN's engines for a convolution: workspace and likelihood of each.

Known limit: which engine cuDNN's heuristics choose for some sizes cannot be known without cuDNN. The workspaces can be
known, because tensor-core kernels work on channels-last tensors. pytorch issue 166643 has input + weight + output to
four digits. Published profiles of Ampere show the kernels that copy: two before each such product, and one after it
unless its name ends in `nchw`.

    in place    reads and writes the tensors as given: direct and implicit products, 1x1 as a plain product; no bytes
    operands    forward alone: reads channels-last copies, and writes the given layout (kernels called nhwckrsc_nchw)
    copies      reads and writes channels-last copies (nhwckrsc_nhwc, cutlass_tensorop_..._nhwc)
    winograd    the data gradient of 3x3 with stride 1: transformed weights, 16 numbers for 9 (ampere_scudnn_winograd)

Engines that work in place explain the measured jobs best, for all kinds of convolution. The others have even shares of
the rest. Convolutions of one kind are much alike, so in a job most of them take the same engine.

On Hopper, copies are the rule for dense convolutions, and for pointwise ones with a stride. Those of ResNet-50 and
VGG-16 on an H100 take input, weight and output to three digits (torch 2.11, cuDNN 9.19, float32). The gradient of a
weight is also summed from parts. Its workspace therefore does not fit where that of the input's gradient was.
"""

from __future__ import annotations

from dataclasses import dataclass

from .capability import capability_of

ENGINES = ("in place", "operands", "copies", "winograd")
COPIED = "copied"
"""The shape of dense convolutions where copies are the rule."""
SPLITS, SPLIT_BYTES = 16, 8 << 20
"""Parts that a weight's gradient is summed from on Hopper, and the most bytes of them."""
POINTWISE_SPLITS, POINTWISE_BYTES = 64, 64 << 20
"""The same of pointwise convolutions, which have none where they would take more."""
_FEW_CHANNELS = 4  # too few for the tiles of tensor cores


@dataclass(frozen=True)
class Shares:
    """Share of the kinds of convolution whose engine works in place, by pass."""

    forward: float
    backward: float


SHARES = Shares(forward=0.99, backward=0.99)

UNEXPLAINED = 0.05
"""How far measured jobs with convolutions are outside the bytes of sampled engines, as a share of the whole."""


@dataclass(frozen=True)
class Convolution:
    """The sizes of a convolution, in elements, as forward sees them."""

    x: int
    """Elements of the input."""
    w: int
    """Elements of the weight."""
    y: int
    """Elements of the output."""
    batch: int
    channels_in: int
    channels_out: int
    groups: int
    kernel: int
    """The number of taps."""
    stride: int
    channels_last: int
    """Whether the tensors' layout is channels-last, as 0 or 1."""
    dimensions: int

    @property
    def one_sample(self) -> tuple[int, ...]:
        """The sizes for one sample, which identify it within its network."""
        each = max(self.batch, 1)
        return (self.x // each, self.w, self.y // each, self.groups, self.kernel, self.stride)


def kind_of(family: str, conv: Convolution, dtype: str, compute_capability: str) -> str | None:
    """Return the kind of a convolution and its pass, such as `dense forward`; None if all engines work in place."""
    capability = capability_of(compute_capability)
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and dtype != "float32")
    depthwise = conv.groups == conv.channels_in > 1  # in float32 a kernel of PyTorch's own
    if not tensor_cores or conv.channels_last or conv.channels_in <= _FEW_CHANNELS or depthwise:
        return None
    dense = COPIED if capability == (9, 0) else "dense"
    pointwise = conv.kernel == 1 and (conv.stride == 1 or dense != COPIED)
    shape = "grouped" if conv.groups > 1 else "pointwise" if pointwise else dense
    return f"{shape} {family.removeprefix('conv_').removeprefix('backward_')}"


def workspaces(family: str, conv: Convolution, item: int, compute_capability: str) -> tuple[int, int, int, int]:
    """Return the workspace bytes of each of ENGINES, for items of `item` bytes."""
    x, w, y = conv.x * item, conv.w * item, conv.y * item
    copies, parts = x + w + y, 0
    if family == "conv_backward_weight" and capability_of(compute_capability) == (9, 0):
        copies += min(SPLITS * w, SPLIT_BYTES)
        parts = (
            POINTWISE_SPLITS * w if conv.kernel == conv.stride == 1 and POINTWISE_SPLITS * w <= POINTWISE_BYTES else 0
        )
    writes = {"conv_forward": y, "conv_backward_data": x, "conv_backward_weight": w}[family]
    any_layout = capability_of(compute_capability) not in {(8, 0), (9, 0)}  # large GPUs have none of these kernels
    fused = conv.kernel == 9 and conv.stride == 1 and conv.groups == 1 and conv.dimensions == 2
    winograd = 16 * conv.channels_in * conv.channels_out * item if fused else 0
    return parts, copies - writes if any_layout else copies, copies, min(winograd, copies)


def chances(kind: str, shares: Shares) -> tuple[float, float, float, float]:
    """Return the likelihood of each of ENGINES for a kind of convolution."""
    if likeliest(kind):
        return 1 - shares.forward, 0.0, shares.forward, 0.0
    if kind.endswith("forward"):
        rest = (1 - shares.forward) / 2
        return shares.forward, rest, rest, 0.0
    rest = 1 - shares.backward
    return (shares.backward, 0.0, rest / 2, rest / 2) if kind == "dense data" else (shares.backward, 0.0, rest, 0.0)


def likeliest(kind: str) -> int:
    """Return the position in ENGINES of the likeliest engine."""
    return ENGINES.index("copies" if kind.startswith(COPIED) else "in place")


def roomy(kind: str) -> int:
    """Return the position in ENGINES of the engine that plans reserve workspace for.

    With it, cuDNN can still take tensor cores or Winograd.
    """
    return {"dense forward": 1, "dense data": 3}.get(kind, likeliest(kind))
