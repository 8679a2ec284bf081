"""GoogLeNet, Inception v1 (Szegedy et al., arXiv:1409.4842).

Table 1 and Figure 3, without batch norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.models.built_model import BuiltModel, checked_size
from overspill.models.vision import classification_loss, image_batches

from .auxiliary import auxiliary_loss

# Table 1: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection.
_INCEPTION = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
_POOL_AFTER = ("3b", "4e")
_AUXILIARY_AFTER = ("4a", "4d")
_AUXILIARY_WEIGHT = 0.3  # §5


def _conv(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2), nn.ReLU())


def _pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, ceil_mode=True)


class ResponseNorm(nn.Module):
    """Local response normalisation across five channels (Krizhevsky et al. 2012, §3.3).

    The window is summed from shifted slices: nn.LocalResponseNorm goes through avg_pool3d, whose CUDA backward adds
    with atomics in any order, and training here must repeat to the last bit.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the maps x / (1 + 1e-4 * mean of squares over the window) ** 0.75."""
        channels = x.shape[1]
        squares = F.pad(x.square(), (0, 0, 0, 0, 2, 2))
        window = squares[:, :channels]
        for shift in range(1, 5):
            window = window + squares[:, shift : shift + channels]
        return x / (1 + 1e-4 / 5 * window).pow(0.75)


class GoogLeNetInception(nn.Module):
    """Four parallel branches, joined along channels (Figure 2b)."""

    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        one, three_reduce, three, five_reduce, five, pool = widths
        self.one = _conv(channels, one, 1)
        self.three = nn.Sequential(_conv(channels, three_reduce, 1), _conv(three_reduce, three, 3))
        self.five = nn.Sequential(_conv(channels, five_reduce, 1), _conv(five_reduce, five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), _conv(channels, pool, 1))
        self.channels = one + three + five + pool

    def forward(self, x: Tensor) -> Tensor:
        """Return the four branches' maps, concatenated."""
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def _auxiliary(channels: int, shrink: int, classes: int) -> nn.Sequential:
    """Return an auxiliary classifier (§5).

    Pool to 4x4, 128 1x1 convolutions, 1024 units, 70 % dropout. The paper's 5x5 pool of stride 3 makes 4x4 of the 14x14
    maps at 224; adaptive pooling does so at any size, with the same windows' sizes to within one.
    """
    width, hidden = 128 // shrink, 1024 // shrink
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4),
        _conv(channels, width, 1),
        nn.Flatten(),
        nn.Linear(width * 16, hidden),
        nn.ReLU(),
        nn.Dropout(0.7),
        nn.Linear(hidden, classes),
    )


class GoogLeNet(nn.Module):
    """The network of Table 1.

    `shrink` divides every width, `auxiliary` adds the two auxiliary classifiers.
    """

    def __init__(self, *, classes: int, shrink: int, auxiliary: bool) -> None:
        super().__init__()
        c1, c2 = 64 // shrink, 192 // shrink
        stem = [
            _conv(3, c1, 7, 2),
            _pool(),
            ResponseNorm(),
            _conv(c1, c1, 1),
            _conv(c1, c2, 3),
            ResponseNorm(),
            _pool(),
        ]
        self.stem = nn.Sequential(*stem)
        # Inception blocks, some followed by a pool or an auxiliary classifier.
        self.blocks = nn.ModuleDict()
        self.auxiliaries = nn.ModuleDict()
        channels = c2
        for name, widths in _INCEPTION.items():
            block = GoogLeNetInception(channels, tuple(max(2, width // shrink) for width in widths))
            channels = block.channels
            self.blocks[name] = nn.Sequential(block, _pool()) if name in _POOL_AFTER else block
            if auxiliary and name in _AUXILIARY_AFTER:
                self.auxiliaries[name] = _auxiliary(channels, shrink, classes)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(channels, classes))

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the logits; in training with auxiliary classifiers, a tuple with theirs, the main logits last."""
        side = []
        x = self.stem(x)
        for name, block in self.blocks.items():
            x = block(x)
            if self.training and name in self.auxiliaries:
                side.append(self.auxiliaries[name](x))
        logits = self.head(x)
        return (logits, *side) if side else logits


def _init(module: nn.Module) -> None:
    """Set the initial weights of Caffe's `bvlc_googlenet/train_val.prototxt`; the paper gives none.

    Its "xavier" is uniform of variance 1 / fan-in, and its convolutions' bias of 0.2 keeps the signal alive.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")
            nn.init.constant_(layer.bias, 0.2 if isinstance(layer, nn.Conv2d) else 0.0)


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """GoogLeNet at 224x224, or a small one.

    It has 1000 classes; the small one has 10 at 64x64 and a sixteenth of the width.
    """
    image_size = checked_size(name, "image_size", size, default=64 if small else 224, minimum=32)
    classes = 10 if small else 1000
    auxiliary = name == "googlenet-aux"
    module = GoogLeNet(classes=classes, shrink=16 if small else 1, auxiliary=auxiliary)
    _init(module)
    loss = auxiliary_loss(_AUXILIARY_WEIGHT) if auxiliary else classification_loss
    return BuiltModel(name, module, image_batches(image_size, classes), loss)
