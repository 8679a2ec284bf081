"""OverFeat, the fast model: Sermanet et al., arXiv:1312.6229, Table 1.

As convnet-benchmarks has it (`torch7/imagenet_winners/overfeat.lua`), which is how later work measures it: no dropout
between the linear layers.
"""

from __future__ import annotations

from torch import nn

from overspill.models.built_model import BuiltModel, checked_size
from overspill.models.vision import classification_loss, he_init, image_batches, resized_grid


def _last_grid(image_size: int) -> int:
    """Return the side of the last activations for an image of this side; 6 at 231."""
    side = ((image_size - 11) // 4 + 1) // 2
    return (side - 4) // 2 // 2


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """OverFeat at 231x231, or a small one.

    It has 1000 classes; the small one has 10 at 71x71, and 8 to 16 channels.
    """
    image_size = checked_size(name, "image_size", size, default=71 if small else 231, minimum=71)
    c1, c2, c3, c4 = (8, 8, 16, 16) if small else (96, 256, 512, 1024)
    grid, h1, h2, classes = (1, 32, 32, 10) if small else (6, 3072, 4096, 1000)
    # Five convolutions, then three linear layers.
    module = nn.Sequential(
        nn.Conv2d(3, c1, 11, stride=4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(c1, c2, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(c2, c3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(c3, c4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(c4, c4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        resized_grid(_last_grid(image_size), grid),
        nn.Flatten(),
        nn.Linear(c4 * grid * grid, h1),
        nn.ReLU(),
        nn.Linear(h1, h2),
        nn.ReLU(),
        nn.Linear(h2, classes),
    )
    he_init(module, "fan_in", linear_std=0.1 if small else 0.01)
    return BuiltModel(name, module, image_batches(image_size, classes), classification_loss)
