"""DeepLab v3+ on ResNet-101 (Chen et al., arXiv:1802.02611).

Figure 2, with output stride 16 (§4.2). The encoder's pyramid pooling is that of DeepLab v3, arXiv:1706.05587, §3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.models.built_model import BuiltModel, checked_size
from overspill.models.resnet import bottleneck_block, conv_norm, projection
from overspill.models.unet import segmentation_loss
from overspill.models.vision import check_normalised_batch, he_init

_CLASSES = 21  # PASCAL VOC 2012
_RATES = (6, 12, 18)  # arXiv:1706.05587, §3.3, at output stride 16


@dataclass(frozen=True)
class _DeepLabShape:
    stages: tuple[int, ...]
    stem: int
    head: int
    low_level: int  # §4.1: "the channels of the low-level feature map from the encoder module" reduced to 48


_FULL = _DeepLabShape(stages=(3, 4, 23, 3), stem=64, head=256, low_level=48)
_SMALL = _DeepLabShape(stages=(1, 1, 1, 1), stem=8, head=16, low_level=6)


def _relu_conv(channels: int, width: int, kernel: int, rate: int = 1) -> nn.Sequential:
    return nn.Sequential(conv_norm(channels, width, kernel, rate=rate), nn.ReLU())


class Bilinear(nn.Module):
    """Bilinear upsampling of square maps, with aligned corners.

    It is two products with a constant matrix. nn.Upsample's CUDA backward adds with atomics in any order, and training
    here must repeat to the last bit.
    """

    def __init__(self, have: int, want: int) -> None:
        super().__init__()
        places = torch.linspace(0, have - 1, want, dtype=torch.float64)
        distances = (places[:, None] - torch.arange(have)).abs()
        self.register_buffer("weights", (1 - distances).clamp(min=0).float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps `[batch, channels, want, want]` of `[batch, channels, have, have]`."""
        columns = F.linear(x, self.weights)
        return F.linear(columns.transpose(2, 3), self.weights).transpose(2, 3)


class Pyramid(nn.Module):
    """Atrous spatial pyramid pooling.

    A pixel sees its neighbourhood, three wider ones by rates, and the whole image.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        atrous = [_relu_conv(channels, width, 3, rate) for rate in _RATES]
        self.local = nn.ModuleList([_relu_conv(channels, width, 1), *atrous])
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), _relu_conv(channels, width, 1))
        self.project = _relu_conv((len(_RATES) + 2) * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps of x's side."""
        whole = self.whole(x).expand(-1, -1, *x.shape[2:])
        return self.project(torch.cat([*(branch(x) for branch in self.local), whole], 1))


def _stage(channels: int, width: int, blocks: int, stride: int, rate: int) -> nn.Sequential:
    first = bottleneck_block(channels, width, stride, projection, rate)
    return nn.Sequential(first, *(bottleneck_block(4 * width, width, 1, projection, rate) for _ in range(blocks - 1)))


class DeepLab(nn.Module):
    """Encoder and decoder of Figure 2 for square images of one size."""

    def __init__(self, shape: _DeepLabShape, image_size: int) -> None:
        super().__init__()
        one, two, three, four = shape.stages
        stem, head = shape.stem, shape.head
        # The encoder.
        self.low = nn.Sequential(
            conv_norm(3, stem, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), _stage(stem, stem, one, 1, 1)
        )
        self.high = nn.Sequential(
            _stage(4 * stem, 2 * stem, two, 2, 1),
            _stage(8 * stem, 4 * stem, three, 2, 1),
            _stage(16 * stem, 8 * stem, four, 1, 2),  # atrous where ResNet would stride
            Pyramid(32 * stem, head),
        )
        # The decoder.
        self.reduce = _relu_conv(4 * stem, shape.low_level, 1)
        quarter, sixteenth = ((image_size - 1) // stride + 1 for stride in (4, 16))
        self.grow = Bilinear(sixteenth, quarter)
        self.refine = nn.Sequential(_relu_conv(head + shape.low_level, head, 3), _relu_conv(head, head, 3))
        self.classify = nn.Conv2d(head, _CLASSES, 1)
        self.to_image = Bilinear(quarter, image_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[batch, classes, side, side]`."""
        low = self.low(x)
        joined = torch.cat([self.reduce(low), self.grow(self.high(low))], 1)
        return self.to_image(self.classify(self.refine(joined)))


def _batches(name: str, image_size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        check_normalised_batch(name, batch_size, image_size, None)  # the pyramid pools the image to 1x1
        images = torch.randn(batch_size, 3, image_size, image_size, device="cpu")
        return images, torch.randint(_CLASSES, (batch_size, image_size, image_size), device="cpu")

    return make_batch


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """DeepLab v3+ at 513x513, or a small one.

    It has 21 classes; the small one has one block a stage, 8 channels in the first, at 65x65.
    """
    image_size = checked_size(name, "image_size", size, default=65 if small else 513, minimum=32)
    module = DeepLab(_SMALL if small else _FULL, image_size)
    he_init(module, "fan_out")
    return BuiltModel(name, module, _batches(name, image_size), segmentation_loss)
