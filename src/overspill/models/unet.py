"""U-Net with padded convolutions (Ronneberger et al., arXiv:1505.04597, Figure 1).

Input and output sizes agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .built_model import BuiltModel, checked_size
from .vision import he_init

_CLASSES = 2
_STRIDE = 16  # four pools of two


def _pair(channels: int, width: int) -> nn.Sequential:
    """Return two 3x3 convolutions, each with a ReLU, as in the figure."""
    first, second = nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU())


class UNet(nn.Module):
    """A contracting and an expanding path, with a skip connection at each level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(5)]
        inputs = [3, *widths[:-1]]
        self.down = nn.ModuleList(_pair(c, w) for c, w in zip(inputs, widths, strict=True))
        upward = widths[-2::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in upward)
        self.up = nn.ModuleList(_pair(2 * w, w) for w in upward)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(0.5)  # §3.1: "at the end of the contracting path"
        self.classify = nn.Conv2d(width, _CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, `[batch, classes, height, width]`."""
        skips = []
        for pair in self.down[:-1]:
            x = pair(x)
            skips.append(x)
            x = self.pool(x)
        x = self.dropout(self.down[-1](x))
        for grow, pair in zip(self.grow, self.up, strict=True):
            x = pair(torch.cat([skips.pop(), grow(x)], 1))
        return self.classify(x)


def segmentation_loss(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over pixels.

    The mean is a separate op, because cross entropy's own mean over images adds with atomics on CUDA.
    """
    return F.cross_entropy(module(images), labels, reduction="none").mean()


def _batches(image_size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(batch_size, 3, image_size, image_size, device="cpu")
        return images, torch.randint(_CLASSES, (batch_size, image_size, image_size), device="cpu")

    return make_batch


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return U-Net at 256x256, or a small one.

    It has 64 to 1024 channels; the small one has 8 to 128 at 32x32.
    """
    default = 32 if small else 256
    image_size = checked_size(name, "image_size", size, default=default, minimum=_STRIDE, multiple=_STRIDE)
    module = UNet(8 if small else 64)
    he_init(module, "fan_in")
    return BuiltModel(name, module, _batches(image_size), segmentation_loss)
