"""pix2pixHD (Wang et al., arXiv:1711.11585).

The global generator with its multi-scale discriminators (§3.2, appendix). One step trains both sides on one scalar. The
generator's loss passes through discriminators whose weights are constants there. The discriminators' loss reads a
generated image that is a constant there. So each side gets its own gradient and no other. The perceptual loss of a
pretrained VGG, optional in the paper, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.models.built_model import BuiltModel, checked_size

_KERNEL = 4
_STRIDES = (2, 2, 2, 1)  # C64-C128-C256-C512; the last keeps the side, which makes the patches 70x70
_FEATURE_WEIGHT = 10.0  # §4: lambda


@dataclass(frozen=True)
class _Pix2PixShape:
    classes: int  # one-hot, beside one channel for the edges between instances (§3.3)
    width: int
    halvings: int
    blocks: int
    discriminators: int


_FULL = _Pix2PixShape(classes=35, width=64, halvings=4, blocks=9, discriminators=3)
_SMALL = _Pix2PixShape(classes=5, width=8, halvings=2, blocks=1, discriminators=2)

Features = list[Tensor]


class ReflectionPad(nn.Module):
    """Reflection of `width` pixels at each border.

    The borders are flipped slices: nn.ReflectionPad2d's CUDA backward adds with atomics in any order, and training here
    must repeat to the last bit.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Return maps with `width` more pixels on each side of `x`."""
        for axis in (2, 3):
            before = x.narrow(axis, 1, self.width)
            after = x.narrow(axis, x.shape[axis] - 1 - self.width, self.width)
            if self.width > 1:
                before, after = before.flip(axis), after.flip(axis)
            x = torch.cat([before, x, after], axis)
        return x


def _conv(channels: int, width: int, kernel: int) -> list[nn.Module]:
    """Return a convolution and its instance norm on reflected borders."""
    return [ReflectionPad(kernel // 2), nn.Conv2d(channels, width, kernel), nn.InstanceNorm2d(width)]


class ResidualBlock(nn.Module):
    """x + two 3x3 convolutions of it (R1024 of the appendix)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(*_conv(width, width, 3), nn.ReLU(), *_conv(width, width, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return x + self.branch(x)


def _generator(shape: _Pix2PixShape) -> nn.Sequential:
    """Return c7s1-64, d128, d256, d512, d1024, nine R1024, u512, u256, u128, u64, c7s1-3 (appendix)."""
    widths = [shape.width * 2**level for level in range(shape.halvings + 1)]
    layers: list[nn.Module] = [*_conv(shape.classes + 1, widths[0], 7), nn.ReLU()]
    for channels, width in pairwise(widths):
        layers += [nn.Conv2d(channels, width, 3, 2, padding=1), nn.InstanceNorm2d(width), nn.ReLU()]
    layers += [ResidualBlock(widths[-1]) for _ in range(shape.blocks)]
    for channels, width in zip(widths[:0:-1], widths[-2::-1], strict=True):
        grow = nn.ConvTranspose2d(channels, width, 3, 2, padding=1, output_padding=1)
        layers += [grow, nn.InstanceNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, ReflectionPad(3), nn.Conv2d(widths[0], 3, 7), nn.Tanh())


class Discriminator(nn.Module):
    """A PatchGAN, which judges whether each patch of 70x70 pixels of a label map and an image is real."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList()
        for level, stride in enumerate(_STRIDES):
            self.convs.append(nn.Conv2d(channels, width * 2**level, _KERNEL, stride, padding=2))
            channels = width * 2**level
        self.score = nn.Conv2d(channels, 1, _KERNEL, padding=2)

    def forward(self, x: Tensor, *, learns: bool) -> Features:
        """Return the maps of each layer, the scores last.

        Unless it `learns`, its weights are constants.
        """
        features = []
        for level, conv in enumerate(self.convs):
            x = _convolve(conv, x, learns=learns)
            x = F.leaky_relu(F.instance_norm(x) if level > 0 else x, 0.2)
            features.append(x)
        return [*features, _convolve(self.score, x, learns=learns)]


def _convolve(conv: nn.Module, x: Tensor, *, learns: bool) -> Tensor:
    weight, bias = (conv.weight, conv.bias) if learns else (conv.weight.detach(), conv.bias.detach())
    return F.conv2d(x, weight, bias, conv.stride, conv.padding)


class Pix2PixHd(nn.Module):
    """The generator and its discriminators, each of which sees half the side of the one before (§3.2)."""

    def __init__(self, shape: _Pix2PixShape) -> None:
        super().__init__()
        self.generator = _generator(shape)
        channels = shape.classes + 1 + 3
        self.discriminators = nn.ModuleList(Discriminator(channels, shape.width) for _ in range(shape.discriminators))
        self.shrink = nn.AvgPool2d(3, 2, padding=1, count_include_pad=False)
        _init(self)

    def forward(self, labels: Tensor, images: Tensor) -> tuple[list[Features], list[Features], list[Features]]:
        """Return each discriminator's features of real, detached generated and undetached generated images."""
        generated = self.generator(labels)
        real = self._features(labels, images, learns=True)
        fake = self._features(labels, generated.detach(), learns=True)
        return real, fake, self._features(labels, generated, learns=False)

    def _features(self, labels: Tensor, images: Tensor, *, learns: bool) -> list[Features]:
        x = torch.cat([labels, images], 1)
        features = []
        for index, discriminator in enumerate(self.discriminators):
            x = self.shrink(x) if index > 0 else x
            features.append(discriminator(x, learns=learns))
        return features


def _init(module: nn.Module) -> None:
    """Set normal weights of 0.02 (appendix, after Isola et al. 2017)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)


def adversarial_loss(module: nn.Module, labels: Tensor, images: Tensor) -> Tensor:
    """Return the losses of generator and discriminators, summed over the discriminators.

    They use least squares (LSGAN) and feature matching. The discriminators' loss is the mean of (D(real) - 1)^2 and
    D(fake)^2. The generator's is (D(fake) - 1)^2 and, ten times, the mean absolute difference between the features of
    real and fake in every layer (equation 4).
    """
    loss = images.new_zeros(())
    for real, fake, judged in zip(*module(labels, images), strict=True):
        loss = loss + 0.5 * ((real[-1] - 1).square().mean() + fake[-1].square().mean())
        loss = loss + (judged[-1] - 1).square().mean()
        for of_real, of_fake in zip(real[:-1], judged[:-1], strict=True):
            loss = loss + _FEATURE_WEIGHT * F.l1_loss(of_fake, of_real.detach())
    return loss


def _batches(classes: int, height: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        places = (batch_size, height, 2 * height)
        one_hot = F.one_hot(torch.randint(classes, places, device="cpu"), classes).movedim(3, 1).float()
        edges = torch.randint(2, (batch_size, 1, *places[1:]), device="cpu").float()
        images = torch.rand(batch_size, 3, *places[1:], device="cpu") * 2 - 1
        return torch.cat([one_hot, edges], 1), images

    return make_batch


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """pix2pixHD at 512x1024, or a small one.

    It has Cityscapes' 35 labels; the small one has 5 at 32x64, and 8 channels. `size` is the height; images are twice
    as wide.
    """
    height = checked_size(name, "image_size", size, default=32 if small else 512, minimum=32, multiple=16)
    shape = _SMALL if small else _FULL
    return BuiltModel(name, Pix2PixHd(shape), _batches(shape.classes, height), adversarial_loss)
