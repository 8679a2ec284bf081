"""Inception v3, v4 and Inception-ResNet v2, as in the papers' figures.

Inception v3: Szegedy et al., arXiv:1512.00567, Figures 5 to 7 and 10 and Table 1; the widths that the table leaves out
are those of torchvision 0.28 `models/inception.py`. Inception v4: Szegedy et al., arXiv:1602.07261, Figures 3 to 9.
Inception-ResNet v2: the same paper's Figures 16 to 19 in the numbers that its authors released (tensorflow/models
`research/slim/nets/inception_resnet_v2.py`: the stem of v3, and 10, 20 and 10 residual blocks), which is what is meant
by its 55.8 M parameters; Figure 15 has 5, 10 and 5 blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.models.built_model import BuiltModel, checked_size
from overspill.models.vision import classification_loss, he_init, normalised_image_batches

from .auxiliary import auxiliary_loss

_ONE_PIXEL = 106  # the largest image whose last maps are 1x1
_AUXILIARY_GRID = 17  # at 299
_AUXILIARY_WEIGHT = 0.4  # as the authors' `inception_v3.py` and torchvision's training recipe; the paper gives none


@dataclass(frozen=True)
class Conv:
    """A convolution without bias, with batch norm and ReLU.

    A kernel that ends in V is not padded, as in the figures.
    """

    width: int
    kernel: str = "1x1"
    stride: int = 1


@dataclass(frozen=True)
class Pool:
    """3x3 pooling. `max` halves the side without padding, `average` keeps it."""

    kind: str


@dataclass(frozen=True)
class Fork:
    """Parallel branches on the same input, joined along channels.

    An empty branch is the input.
    """

    branches: tuple[tuple[Item, ...], ...]


@dataclass(frozen=True)
class InceptionResidual:
    """Branches whose scaled sum with the input is the output.

    A linear 1x1 convolution brings them back to the input's channels (§3.3).
    """

    branches: tuple[tuple[Item, ...], ...]
    scale: float
    activate: bool = True


@dataclass(frozen=True)
class InceptionStage:
    """Blocks of one kind in sequence; small networks have one."""

    blocks: tuple[Item, ...]


Item = Conv | Pool | Fork | InceptionResidual | InceptionStage
_MAX, _AVERAGE = Pool("max"), Pool("average")


@dataclass(frozen=True)
class Network:
    """The layers before and after the auxiliary classifier's input."""

    before: tuple[Item, ...]
    after: tuple[Item, ...]
    dropout: float
    """The share that dropout leaves out."""


# arXiv:1512.00567, Table 1
_V3_STEM = (Conv(32, "3x3V", 2), Conv(32, "3x3V"), Conv(64, "3x3"), _MAX, Conv(80), Conv(192, "3x3V"), _MAX)


def _v3_grid35(pool: int, one: int = 64) -> Fork:
    """Return the block of Figure 5, with a 5x5 convolution left in one branch."""
    five = (Conv(48), Conv(64, "5x5"))
    return Fork(((Conv(one),), five, (Conv(64), Conv(96, "3x3"), Conv(96, "3x3")), (_AVERAGE, Conv(pool))))


def _v3_grid17(width: int) -> Fork:
    """Return the block of Figure 6 with n = 7."""
    seven = (Conv(width), Conv(width, "1x7"), Conv(192, "7x1"))
    twice = (Conv(width), Conv(width, "7x1"), Conv(width, "1x7"), Conv(width, "7x1"), Conv(192, "1x7"))
    return Fork(((Conv(192),), seven, twice, (_AVERAGE, Conv(192))))


def _reduction_a(one: int, three: int, last: int, alone: int) -> Fork:
    """Return a block that halves the side.

    arXiv:1602.07261, Figure 7, whose k, l, m and n these are; arXiv:1512.00567 has it as Figure 10.
    """
    return Fork(((Conv(alone, "3x3V", 2),), (Conv(one), Conv(three, "3x3"), Conv(last, "3x3V", 2)), (_MAX,)))


def _crossed(width: int) -> Fork:
    """Return a branch's end that forks into a 1x3 and a 3x1 convolution."""
    return Fork(((Conv(width, "1x3"),), (Conv(width, "3x1"),)))


# Figure 7
_V3_GRID8 = Fork(
    ((Conv(320),), (Conv(384), _crossed(384)), (Conv(448), Conv(384, "3x3"), _crossed(384)), (_AVERAGE, Conv(192)))
)
_V3_REDUCTION = Fork(
    ((Conv(192), Conv(320, "3x3V", 2)), (Conv(192), Conv(192, "1x7"), Conv(192, "7x1"), Conv(192, "3x3V", 2)), (_MAX,))
)
_V3 = Network(
    before=(
        *_V3_STEM,
        InceptionStage((_v3_grid35(32), _v3_grid35(64), _v3_grid35(64))),
        _reduction_a(64, 96, 96, 384),
        InceptionStage((_v3_grid17(128), _v3_grid17(160), _v3_grid17(160), _v3_grid17(192))),
    ),
    after=(_V3_REDUCTION, InceptionStage((_V3_GRID8, _V3_GRID8))),
    dropout=0.5,
)

# arXiv:1602.07261, Figure 3
_V4_STEM = (
    Conv(32, "3x3V", 2),
    Conv(32, "3x3V"),
    Conv(64, "3x3"),
    Fork(((_MAX,), (Conv(96, "3x3V", 2),))),
    Fork(((Conv(64), Conv(96, "3x3V")), (Conv(64), Conv(64, "7x1"), Conv(64, "1x7"), Conv(96, "3x3V")))),
    Fork(((Conv(192, "3x3V", 2),), (_MAX,))),
)
# Figure 4
_V4_A = Fork(
    ((_AVERAGE, Conv(96)), (Conv(96),), (Conv(64), Conv(96, "3x3")), (Conv(64), Conv(96, "3x3"), Conv(96, "3x3")))
)
# Figure 5
_V4_B = Fork(
    (
        (_AVERAGE, Conv(128)),
        (Conv(384),),
        (Conv(192), Conv(224, "1x7"), Conv(256, "7x1")),
        (Conv(192), Conv(192, "1x7"), Conv(224, "7x1"), Conv(224, "1x7"), Conv(256, "7x1")),
    )
)
# Figure 6
_V4_C = Fork(
    (
        (_AVERAGE, Conv(256)),
        (Conv(256),),
        (Conv(384), _crossed(256)),
        (Conv(384), Conv(448, "1x3"), Conv(512, "3x1"), _crossed(256)),
    )
)
# Figure 8
_V4_REDUCTION_B = Fork(
    ((_MAX,), (Conv(192), Conv(192, "3x3V", 2)), (Conv(256), Conv(256, "1x7"), Conv(320, "7x1"), Conv(320, "3x3V", 2)))
)
_V4 = Network(
    before=(
        *_V4_STEM,
        InceptionStage((_V4_A,) * 4),
        _reduction_a(192, 224, 256, 384),
        InceptionStage((_V4_B,) * 7),
    ),  # Table 1
    after=(_V4_REDUCTION_B, InceptionStage((_V4_C,) * 3)),
    dropout=0.2,  # Figure 9: "keep 0.8"
)

# Figures 16, 17 and 19; the scales are those of the release, between the 0.1 and 0.3 of §3.3
_RESNET_A = InceptionResidual(
    ((Conv(32),), (Conv(32), Conv(32, "3x3")), (Conv(32), Conv(48, "3x3"), Conv(64, "3x3"))), scale=0.17
)
_RESNET_B = InceptionResidual(((Conv(192),), (Conv(128), Conv(160, "1x7"), Conv(192, "7x1"))), scale=0.1)
_RESNET_C_BRANCHES = ((Conv(192),), (Conv(192), Conv(224, "1x3"), Conv(256, "3x1")))
_RESNET_C = InceptionResidual(_RESNET_C_BRANCHES, scale=0.2)
# Figure 18
_RESNET_REDUCTION_B = Fork(
    (
        (Conv(256), Conv(384, "3x3V", 2)),
        (Conv(256), Conv(288, "3x3V", 2)),
        (Conv(256), Conv(288, "3x3"), Conv(320, "3x3V", 2)),
        (_MAX,),
    )
)
_RESNET = Network(
    before=(
        *_V3_STEM,
        _v3_grid35(64, one=96),
        InceptionStage((_RESNET_A,) * 10),
        _reduction_a(256, 256, 384, 384),
        InceptionStage((_RESNET_B,) * 20),
    ),
    after=(
        _RESNET_REDUCTION_B,
        InceptionStage((_RESNET_C,) * 9),
        InceptionResidual(_RESNET_C_BRANCHES, scale=1.0, activate=False),
        Conv(1536),
    ),
    dropout=0.2,
)
_NETWORKS = {"inception-v3": _V3, "inception-v3-aux": _V3, "inception-v4": _V4, "inception-resnet-v2": _RESNET}


class Branches(nn.Module):
    """Parallel branches, joined along channels."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Return the branches' maps, concatenated."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class ScaledResidual(nn.Module):
    """x + scale * expand(branches(x)), with a ReLU if `activate`."""

    def __init__(self, branches: nn.Module, expand: nn.Module, scale: float, *, activate: bool) -> None:
        super().__init__()
        self.branches = branches
        self.expand = expand
        self.scale = scale
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        x = x + self.scale * self.expand(self.branches(x))
        return F.relu(x) if self.activate else x


@dataclass(frozen=True)
class _Builder:
    """Makes modules of the tables' items. The small networks have every width divided by 16 and one block a stage."""

    small: bool

    def width(self, width: int) -> int:
        return max(2, width // 16) if self.small else width

    def conv(self, channels: int, width: int, kernel: str, stride: int = 1) -> nn.Sequential:
        tall, wide = (int(side) for side in kernel.removesuffix("V").split("x"))
        padding = (0, 0) if kernel.endswith("V") else (tall // 2, wide // 2)
        conv = nn.Conv2d(channels, width, (tall, wide), stride, padding, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(width, eps=1e-3), nn.ReLU())

    def sequence(self, items: tuple[Item, ...], channels: int) -> tuple[nn.Sequential, int]:
        """Return the items in sequence, and the number of output channels."""
        layers = []
        for item in items:
            layer, channels = self.item(item, channels)
            layers.append(layer)
        return nn.Sequential(*layers), channels

    def fork(self, branches: tuple[tuple[Item, ...], ...], channels: int) -> tuple[nn.Module, int]:
        built = [self.sequence(branch, channels) for branch in branches]
        return Branches([branch for branch, _ in built]), sum(width for _, width in built)

    def item(self, item: Item, channels: int) -> tuple[nn.Module, int]:
        match item:
            # Layers.
            case Conv():
                width = self.width(item.width)
                return self.conv(channels, width, item.kernel, item.stride), width
            case Pool("max"):
                return nn.MaxPool2d(3, 2), channels
            case Pool():
                return nn.AvgPool2d(3, 1, padding=1, count_include_pad=False), channels
            # Branches and blocks of further items.
            case Fork():
                return self.fork(item.branches, channels)
            case InceptionResidual():
                branches, width = self.fork(item.branches, channels)
                expand = nn.Conv2d(width, channels, 1)
                return ScaledResidual(branches, expand, item.scale, activate=item.activate), channels
            case InceptionStage():
                return self.sequence(item.blocks[:1] if self.small else item.blocks, channels)

    def auxiliary(self, channels: int, image_size: int, classes: int) -> nn.Sequential:
        """Return the auxiliary classifier of arXiv:1512.00567, Figure 8.

        Pool to 5x5, a 1x1 and a 5x5 convolution. Its 5x5 pool of stride 3 makes 5x5 of the 17x17 maps at 299; adaptive
        pooling does so at any size.
        """
        pool = nn.AvgPool2d(5, 3) if _grid(image_size) == _AUXILIARY_GRID else nn.AdaptiveAvgPool2d(5)
        reduce, hidden = self.width(128), self.width(768)
        convs = [self.conv(channels, reduce, "1x1"), self.conv(reduce, hidden, "5x5V")]
        return nn.Sequential(pool, *convs, nn.Flatten(), nn.Linear(hidden, classes))


def _grid(image_size: int) -> int:
    """Return the side of the maps that the auxiliary classifier reads. All three stems shrink an image alike."""
    side = (image_size - 1) // 2 - 2
    side = (side - 1) // 2 - 2
    for _ in range(2):
        side = (side - 1) // 2
    return side


class Inception(nn.Module):
    """A network of the tables above, optionally with its auxiliary classifier."""

    def __init__(self, before: nn.Module, after: nn.Module, head: nn.Module, auxiliary: nn.Module | None) -> None:
        super().__init__()
        self.before = before
        self.after = after
        self.head = head
        self.auxiliary = auxiliary

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits; in training with an auxiliary classifier, the pair of its logits and the main ones."""
        middle = self.before(x)
        logits = self.head(self.after(middle))
        if self.auxiliary is None or not self.training:
            return logits
        return logits, self.auxiliary(middle)


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return an Inception network at 299x299, or a small one.

    It has 1000 classes; the small one has 10 at 107x107 and one block of each kind.
    """
    image_size = checked_size(name, "image_size", size, default=_ONE_PIXEL + 1 if small else 299, minimum=75)
    classes = 10 if small else 1000
    network, make = _NETWORKS[name], _Builder(small)
    before, middle = make.sequence(network.before, 3)
    after, channels = make.sequence(network.after, middle)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(network.dropout), nn.Linear(channels, classes)]
    with_auxiliary = name == "inception-v3-aux"
    auxiliary = make.auxiliary(middle, image_size, classes) if with_auxiliary else None
    module = Inception(before, after, nn.Sequential(*head), auxiliary)
    he_init(module, "fan_in")
    one_pixel = None if with_auxiliary else _ONE_PIXEL  # the auxiliary classifier's last maps are 1x1 at every size
    loss = auxiliary_loss(_AUXILIARY_WEIGHT) if with_auxiliary else classification_loss
    return BuiltModel(name, module, normalised_image_batches(name, image_size, classes, one_pixel), loss)
