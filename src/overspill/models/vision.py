"""What the image classifiers share: batches, loss, initial weights, and a head that accepts any image size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.core.errors import RequestError


def image_batches(image_size: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Returns the `make_batch` of a classifier: normal noise (batch, 3, size, size) and labels (batch,)."""

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(batch_size, 3, image_size, image_size, device="cpu")
        return images, torch.randint(classes, (batch_size,), device="cpu")

    return make_batch


def normalised_image_batches(
    name: str, image_size: int, classes: int, stride: int
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Returns `image_batches` for a network with batch norm, refusing a batch that leaves one value per channel.

    `stride` is the network's whole downsampling; batch norm has no variance to divide by when its last maps are 1x1
    and the batch is a single image.
    """
    draw = image_batches(image_size, classes)

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        if batch_size == 1 and image_size <= stride:
            raise RequestError(
                f"{name} at image_size {image_size} cannot train on a batch of 1: batch norm would see one value per "
                f"channel; use a batch of 2 or image_size {stride + 1} and above"
            )
        return draw(batch_size)

    return make_batch


def classification_loss(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross entropy of the module's logits."""
    return F.cross_entropy(module(images), labels)


def resized_grid(have: int, want: int) -> nn.Module:
    """Returns a module that brings (have, have) maps to (want, want), so that the linear layers fit any image size.

    At the published image size the two agree and it does nothing: the papers have no pooling there.
    """
    return nn.Identity() if have == want else nn.AdaptiveAvgPool2d(want)


def he_init(module: nn.Module, mode: Literal["fan_in", "fan_out"], linear_std: float = 0.01) -> None:
    """Gives convolutions He et al. 2015's normal weights (arXiv:1502.01852 §2.2), linear layers small ones, no biases.

    Deep networks without normalisation keep sane activations only with it.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=linear_std)
        else:
            continue
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
