"""The loss of networks with auxiliary classifiers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F


def auxiliary_loss(weight: float) -> Callable[..., Tensor]:
    """Return the loss of a module with auxiliary classifiers.

    In training the module returns its logits and those of the auxiliary classifiers. The loss is the mean cross entropy
    of the main classifier plus `weight` times that of each auxiliary one.
    """

    def loss_of(module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        outputs = module(images)
        if isinstance(outputs, Tensor):  # not in training
            return F.cross_entropy(outputs, labels)
        loss = F.cross_entropy(outputs[0], labels)
        for logits in outputs[1:]:
            loss = loss + weight * F.cross_entropy(logits, labels)
        return loss

    return loss_of
