"""VGG (Simonyan and Zisserman, arXiv:1409.1556, Table 1), and the deep extensions of vDNN (Rhu et al. 2016, §IV-C)."""

from __future__ import annotations

from torch import nn

from .built_model import BuiltModel, checked_size
from .vision import classification_loss, he_init, image_batches, resized_grid

# Kernel sizes of the convolutions of each of the five groups; a max pool ends a group.
_CONFIGURATIONS: dict[str, tuple[tuple[int, ...], ...]] = {
    "vgg-a": ((3,), (3,), (3, 3), (3, 3), (3, 3)),
    "vgg-b": ((3, 3), (3, 3), (3, 3), (3, 3), (3, 3)),
    "vgg-c": ((3, 3), (3, 3), (3, 3, 1), (3, 3, 1), (3, 3, 1)),
    "vgg-d": ((3, 3), (3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3)),
    "vgg-e": ((3, 3), (3, 3), (3, 3, 3, 3), (3, 3, 3, 3), (3, 3, 3, 3)),
}
# vDNN §IV-C: "Each addition of 100 CONV layers is done by adding 20 more CONV layers to each of the five groups",
# starting from configuration E, whose 16 convolutions that paper calls VGG-16: `vgg16-vdnn` here.
_HUNDREDS = {"vgg116": 1, "vgg216": 2, "vgg316": 3, "vgg416": 4}
_ALIASES = {"vgg11": "vgg-a", "vgg13": "vgg-b", "vgg16": "vgg-d", "vgg19": "vgg-e", "vgg16-vdnn": "vgg-e"}
_STRIDE = 32  # five pools of two


def _groups(name: str, *, small: bool) -> tuple[tuple[int, ...], ...]:
    """Return the kernel sizes of each group's convolutions.

    A small extension adds 1 to 4 convolutions per group; the real one adds 20 to 80.
    """
    configuration = _ALIASES.get(name, name)
    if configuration in _CONFIGURATIONS:
        return _CONFIGURATIONS[configuration]
    more = (3,) * (_HUNDREDS[name] * (1 if small else 20))
    return tuple(group + more for group in _CONFIGURATIONS["vgg-e"])


def _linear_std(name: str, *, small: bool) -> float:
    """Return the standard deviation of the linear layers' initial weights.

    It is torchvision's 0.01, except where that trains badly. The small linear layers would drown the signal at 0.01.
    Over 116 convolutions and more, gradients add up until SGD at a rate of 0.01 diverges within four steps. Half the
    deviation makes them eight times smaller.
    """
    if small:
        return 0.1
    return 0.005 if name in _HUNDREDS else 0.01


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return a VGG at 224x224, or a small one.

    It has 1000 classes; the small one has 10 at 64x64, and 8 to 16 channels.
    """
    image_size = checked_size(name, "image_size", size, default=64 if small else 224, minimum=_STRIDE)
    widths = (8, 8, 16, 16, 16) if small else (64, 128, 256, 512, 512)
    grid, hidden, classes = (1, 32, 10) if small else (7, 4096, 1000)
    layers: list[nn.Module] = []
    # Five groups of convolutions.
    channels = 3
    for width, kernels in zip(widths, _groups(name, small=small), strict=True):
        for kernel in kernels:
            layers += [nn.Conv2d(channels, width, kernel, padding=kernel // 2), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    # Three linear layers.
    head = [
        resized_grid(image_size // _STRIDE, grid),
        nn.Flatten(),
        nn.Linear(channels * grid * grid, hidden),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(hidden, classes),
    ]
    module = nn.Sequential(*layers, *head)
    he_init(module, "fan_out", linear_std=_linear_std(name, small=small))
    return BuiltModel(name, module, image_batches(image_size, classes), classification_loss)
