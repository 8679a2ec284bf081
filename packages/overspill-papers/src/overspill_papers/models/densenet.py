"""DenseNet-BC for ImageNet (Huang et al., arXiv:1608.06993, Table 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overspill.models.built_model import BuiltModel, checked_size
from overspill.models.vision import classification_loss, he_init, normalised_image_batches

# Growth rate k, and layers per dense block; 161 is the paper's "k = 48" network of §4.3.
_NETWORKS = {
    "densenet121": (32, (6, 12, 24, 16)),
    "densenet161": (48, (6, 12, 36, 24)),
    "densenet169": (32, (6, 12, 32, 32)),
    "densenet201": (32, (6, 12, 48, 32)),
}
_SMALL_BLOCKS = (2, 2, 2, 2)
_ONE_PIXEL = 60  # two layers that round up and three pools that round down make 1x1 of it
_BOTTLENECK = 4  # §3: "we let each 1x1 convolution produce 4k feature-maps"


def _conv(channels: int, width: int, kernel: int) -> nn.Sequential:
    """Return batch norm, ReLU and convolution, in the order of §3."""
    conv = nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), conv)


class DenseLayer(nn.Module):
    """A 1x1 and a 3x3 convolution that append `growth` new maps."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        width = _BOTTLENECK * growth
        self.branch = nn.Sequential(_conv(channels, width, 1), _conv(width, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with the new maps appended."""
        return torch.cat([x, self.branch(x)], 1)


def _transition(channels: int) -> nn.Sequential:
    """Return the layer between dense blocks: half the channels and side. §3, compression of 0.5."""
    return nn.Sequential(_conv(channels, channels // 2, 1), nn.AvgPool2d(2))


def _network(growth: int, blocks: tuple[int, ...], classes: int) -> nn.Sequential:
    channels = 2 * growth
    stem = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    for index, count in enumerate(blocks):
        if index > 0:
            layers.append(_transition(channels))
            channels //= 2
        for _ in range(count):
            layers.append(DenseLayer(channels, growth))
            channels += growth
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU(), *head)


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return a DenseNet at 224x224, or a small one.

    It has 1000 classes; the small one has 10 at 64x64 and two layers a block.
    """
    image_size = checked_size(name, "image_size", size, default=64 if small else 224, minimum=32)
    growth, blocks = _NETWORKS[name]
    classes = 10 if small else 1000
    module = _network(growth // 8, _SMALL_BLOCKS, classes) if small else _network(growth, blocks, classes)
    he_init(module, "fan_in")
    return BuiltModel(
        name, module, normalised_image_batches(name, image_size, classes, _ONE_PIXEL), classification_loss
    )
