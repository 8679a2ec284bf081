"""AlexNet in one tower (Krizhevsky, arXiv:1404.5997).

"One weird trick for parallelizing convolutional neural networks". Layer sizes are those of torchvision 0.28
`models/alexnet.py`: 61.1 M parameters, no local response normalisation.
"""

from __future__ import annotations

from torch import nn

from .built_model import BuiltModel, checked_size
from .vision import classification_loss, image_batches, resized_grid


def _last_grid(image_size: int) -> int:
    """Return the side of the last feature maps for an image of this side; it is 6 at 224."""
    side = (image_size + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return AlexNet at 224x224 with 1000 classes, or a small one at 64x64 with 10."""
    image_size = checked_size(name, "image_size", size, default=64 if small else 224, minimum=63)
    c1, c2, c3, c4, c5 = (8, 16, 16, 16, 16) if small else (64, 192, 384, 256, 256)
    grid, hidden, classes = (1, 32, 10) if small else (6, 4096, 1000)
    # Five convolutions, then three linear layers.
    module = nn.Sequential(
        nn.Conv2d(3, c1, 11, stride=4, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(c1, c2, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(c2, c3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(c3, c4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(c4, c5, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, 2),
        resized_grid(_last_grid(image_size), grid),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(c5 * grid * grid, hidden),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )
    return BuiltModel(name, module, image_batches(image_size, classes), classification_loss)
