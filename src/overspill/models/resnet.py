"""ResNet (He et al., arXiv:1512.03385).

Table 1 for ImageNet and §4.2 for CIFAR-10. Bottlenecks downsample in their 3x3 convolution, as torchvision 0.28
`models/resnet.py` does ("v1.5").
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from .built_model import BuiltModel, checked_size
from .vision import classification_loss, he_init, normalised_image_batches

# Blocks per stage; the small ones of 101 and 152 are cut to at most 60 convolutions, above the 53 of ResNet-50.
_STAGES = {
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
    "resnet152": (3, 8, 36, 3),
}
_SMALL_STAGES = _STAGES | {"resnet101": (3, 4, 7, 3), "resnet152": (3, 5, 7, 3)}
_BASIC = ("resnet18", "resnet34")

Shortcut = Callable[[int, int, int], nn.Module]


def conv_norm(channels: int, width: int, kernel: int, stride: int = 1, rate: int = 1) -> nn.Sequential:
    """Return a convolution without bias, with batch norm.

    `rate` is its dilation: the distance between the kernel's taps.
    """
    conv = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2 * rate, dilation=rate, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width))


class PaddedShortcut(nn.Module):
    """A strided shortcut without parameters, option A of §3.3.

    It takes every `stride`-th pixel, and zeros for the channels that are new.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = width - channels

    def forward(self, x: Tensor) -> Tensor:
        """Return the strided input with zero channels appended."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


def projection(channels: int, width: int, stride: int) -> nn.Module:
    """Return a shortcut by a strided 1x1 convolution, or the identity if shapes agree. Option B of §3.3."""
    return nn.Identity() if stride == 1 and channels == width else conv_norm(channels, width, 1, stride)


def padding(channels: int, width: int, stride: int) -> nn.Module:
    """Return a `PaddedShortcut`, or the identity if shapes agree. Option A of §3.3."""
    return nn.Identity() if stride == 1 and channels == width else PaddedShortcut(channels, width, stride)


class Residual(nn.Module):
    """A residual block: relu(branch(x) + shortcut(x))."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return F.relu(self.branch(x) + self.shortcut(x))


def _basic(channels: int, width: int, stride: int, shortcut: Shortcut) -> Residual:
    """Return a residual block of two 3x3 convolutions (Figure 5, left)."""
    branch = nn.Sequential(conv_norm(channels, width, 3, stride), nn.ReLU(), conv_norm(width, width, 3))
    return Residual(branch, shortcut(channels, width, stride))


def bottleneck_block(channels: int, width: int, stride: int, shortcut: Shortcut, rate: int = 1) -> Residual:
    """Return a residual block of 1x1, 3x3 and 1x1 convolutions.

    The last is four times as wide (Figure 5, right).
    """
    reduce, expand = conv_norm(channels, width, 1), conv_norm(width, 4 * width, 1)
    spatial = conv_norm(width, width, 3, stride, rate)
    branch = nn.Sequential(reduce, nn.ReLU(), spatial, nn.ReLU(), expand)
    return Residual(branch, shortcut(channels, 4 * width, stride))


def _stages(
    stages: tuple[int, ...], width: int, *, bottleneck: bool, shortcut: Shortcut
) -> tuple[list[nn.Module], int]:
    """Return the residual stages after a stem, and their output channels.

    The stem has `width` channels; each stage doubles the width.
    """
    block, expansion = (bottleneck_block, 4) if bottleneck else (_basic, 1)
    layers: list[nn.Module] = []
    channels = width
    for stage, blocks in enumerate(stages):
        stage_width = width * 2**stage
        for index in range(blocks):
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(block(channels, stage_width, stride, shortcut))
            channels = stage_width * expansion
    return layers, channels


def _head(channels: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return a ResNet at 224x224, or a small one.

    It has 1000 classes; the small one has 10 at 64x64, and 8 channels in stage one.
    """
    image_size = checked_size(name, "image_size", size, default=64 if small else 224, minimum=32)
    width, classes = (8, 10) if small else (64, 1000)
    stem = [conv_norm(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    counts = (_SMALL_STAGES if small else _STAGES)[name]
    blocks, channels = _stages(counts, width, bottleneck=name not in _BASIC, shortcut=projection)
    module = nn.Sequential(*stem, *blocks, *_head(channels, classes))
    he_init(module, "fan_out")
    return BuiltModel(name, module, normalised_image_batches(name, image_size, classes, 32), classification_loss)


def build_cifar(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return ResNet-32 for CIFAR-10 at 32x32, or a small one.

    §4.2 with n = 5; the small one has half the channels.
    """
    image_size = checked_size(name, "image_size", size, default=32, minimum=4)
    return cifar(name, (5, 5, 5), width=8 if small else 16, image_size=image_size)


def cifar(name: str, blocks: tuple[int, int, int], *, image_size: int, width: int = 16) -> BuiltModel:
    """Return a ResNet for CIFAR-10 with so many basic blocks of `width`, twice and four times `width`."""
    body, channels = _stages(blocks, width, bottleneck=False, shortcut=padding)
    module = nn.Sequential(conv_norm(3, width, 3), nn.ReLU(), *body, *_head(channels, 10))
    he_init(module, "fan_out")
    return BuiltModel(name, module, normalised_image_batches(name, image_size, 10, 4), classification_loss)
