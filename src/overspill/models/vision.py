"""Parts of all image classifiers: batches, losses, initial weights, and a head for any image size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.core.errors import RequestError


def image_batches(image_size: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a `make_batch` of random images and labels: normal noise `[batch, 3, size, size]`, and `[batch]`."""

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(batch_size, 3, image_size, image_size, device="cpu")
        return images, torch.randint(classes, (batch_size,), device="cpu")

    return make_batch


def check_normalised_batch(name: str, batch_size: int, image_size: int, one_pixel: int | None) -> None:
    """Raise RequestError for a batch too small for batch norm.

    One value per channel has no variance to divide by. `one_pixel` is the largest image whose smallest maps are 1x1.
    For a network that pads each of its layers, that is its whole downsampling. None means that images of every size
    have such maps.
    """
    if batch_size == 1 and (one_pixel is None or image_size <= one_pixel):
        larger = "" if one_pixel is None else f" or image_size {one_pixel + 1} and above"
        raise RequestError(
            f"{name} with image_size={image_size} cannot train on a batch of 1: batch norm would see one value per "
            f"channel; use a batch of 2{larger}"
        )


def normalised_image_batches(
    name: str, image_size: int, classes: int, one_pixel: int | None
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return `image_batches`, checked by `check_normalised_batch` to be large enough for batch norm."""
    draw = image_batches(image_size, classes)

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        check_normalised_batch(name, batch_size, image_size, one_pixel)
        return draw(batch_size)

    return make_batch


def classification_loss(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the module's logits."""
    return F.cross_entropy(module(images), labels)


def resized_grid(have: int, want: int) -> nn.Module:
    """Return a module that resizes `[have, have]` maps to `[want, want]`.

    The linear layers then fit any image size. At the published image size the two agree and it does nothing: the papers
    have no pooling there.
    """
    return nn.Identity() if have == want else nn.AdaptiveAvgPool2d(want)


def he_init(module: nn.Module, mode: Literal["fan_in", "fan_out"], linear_std: float = 0.01) -> None:
    """Initialise convolutions with He et al.'s normal weights.

    Source: arXiv:1502.01852 §2.2. Linear layers get small weights, biases are zero. Deep networks without normalisation
    keep sane activations only with it.
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
