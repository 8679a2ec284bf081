"""The convolutional networks of the measured jobs: torchvision's definitions, beside a torch without CUDA.

    python -m pip install --no-deps torchvision==0.28.0 --target DIR    # and pillow, if it is not there
    OVERSPILL_TORCHVISION=DIR python bench/...

The xMem jobs were measured with torchvision 0.21; the definitions of these networks have not changed since.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .beside import add_directory

_MISSING = (
    "torchvision is not installed; make definitions, or python -m pip install --no-deps torchvision==0.28.0 pillow --target DIR, "
    "then set OVERSPILL_TORCHVISION=DIR"
)


@contextmanager
def without_fake_operators() -> Iterator[None]:
    """While this holds, `torchvision::` operators, which only a CUDA build of torch has, get no fake implementation."""
    register = torch.library.register_fake

    def register_ours(op: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(op, str) and op.startswith("torchvision::"):
            return lambda function: function
        return register(op, *arguments, **options)

    torch.library.register_fake = register_ours
    try:
        yield
    finally:
        torch.library.register_fake = register


@functools.cache
def torchvision() -> ModuleType:
    """Returns the torchvision module, installed or from the directory in OVERSPILL_TORCHVISION."""
    add_directory("OVERSPILL_TORCHVISION", first=False)
    try:
        with without_fake_operators():
            return importlib.import_module("torchvision")
    except ImportError as error:
        raise SystemExit(f"{_MISSING} ({error})") from error


# input channels, kernel, expanded channels, output channels, squeeze-and-excite, activation, stride:
# torchvision/models/mobilenetv3.py, _mobilenet_v3_conf, which the jobs repeat with dilation 1 and width 1.
_V3_SMALL = (
    (16, 3, 16, 16, True, "RE", 2),
    (16, 3, 72, 24, False, "RE", 2),
    (24, 3, 88, 24, False, "RE", 1),
    (24, 5, 96, 40, True, "HS", 2),
    (40, 5, 240, 40, True, "HS", 1),
    (40, 5, 240, 40, True, "HS", 1),
    (40, 5, 120, 48, True, "HS", 1),
    (48, 5, 144, 48, True, "HS", 1),
    (48, 5, 288, 96, True, "HS", 2),
    (96, 5, 576, 96, True, "HS", 1),
    (96, 5, 576, 96, True, "HS", 1),
)
_V3_LARGE = (
    (16, 3, 16, 16, False, "RE", 1),
    (16, 3, 64, 24, False, "RE", 2),
    (24, 3, 72, 24, False, "RE", 1),
    (24, 5, 72, 40, True, "RE", 2),
    (40, 5, 120, 40, True, "RE", 1),
    (40, 5, 120, 40, True, "RE", 1),
    (40, 3, 240, 80, False, "HS", 2),
    (80, 3, 200, 80, False, "HS", 1),
    (80, 3, 184, 80, False, "HS", 1),
    (80, 3, 184, 80, False, "HS", 1),
    (80, 3, 480, 112, True, "HS", 1),
    (112, 3, 672, 112, True, "HS", 1),
    (112, 5, 672, 160, True, "HS", 2),
    (160, 5, 960, 160, True, "HS", 1),
    (160, 5, 960, 160, True, "HS", 1),
)


def _mobilenet_v3(blocks: tuple[tuple[Any, ...], ...], last_channel: int) -> nn.Module:
    models = torchvision().models
    config = models.mobilenetv3.InvertedResidualConfig
    setting = [config(*block, dilation=1, width_mult=1.0) for block in blocks]
    return models.MobileNetV3(setting, last_channel=last_channel, num_classes=10)


def _of_1000_classes(name: str) -> Callable[[], nn.Module]:
    return lambda: getattr(torchvision().models, name)(weights=None)


@contextmanager
def _construction_with_fake_tensors() -> Iterator[None]:
    """While this holds, a network can be built under FakeTensorMode: nothing reads the value of a fake tensor."""
    draw = nn.init.trunc_normal_
    params = torchvision().models.regnet.BlockParams
    widths = params.__dict__["from_init_params"]

    def clamped(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Tensor:
        with torch.no_grad():  # torch 2.13 looks which values are too large, and draws again
            return tensor.normal_(mean, std).clamp_(a, b)

    def computed(cls: type, *arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():  # RegNet computes its widths, plain integers, with tensors
            return widths.__func__(cls, *arguments, **options)

    nn.init.trunc_normal_ = clamped
    params.from_init_params = classmethod(computed)
    try:
        yield
    finally:
        nn.init.trunc_normal_ = draw
        params.from_init_params = widths


def build(name: str) -> nn.Module:
    """Returns the network of that name in the data, with random weights, in training mode."""
    if name not in NETWORKS:
        raise SystemExit(f"{name} is no network of the measured jobs; they are {', '.join(sorted(NETWORKS))}")
    with _construction_with_fake_tensors():
        return NETWORKS[name]().train()


# Named as in the data: xMem's perf_estimator/models.py, AllModels; InceptionV3 is DNNMem's.
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ConvNeXtBase": _of_1000_classes("convnext_base"),
    "ConvNeXtTiny": _of_1000_classes("convnext_tiny"),
    "InceptionV3": lambda: torchvision().models.inception_v3(weights=None, aux_logits=False, init_weights=False),
    "MnasNet": lambda: torchvision().models.MNASNet(alpha=1.0, num_classes=10),
    "MobeNetV3Large": lambda: _mobilenet_v3(_V3_LARGE, 1280),
    "MobeNetV3Small": lambda: _mobilenet_v3(_V3_SMALL, 1024),
    "MobileNetV2": _of_1000_classes("mobilenet_v2"),
    "RegNetX32GF": _of_1000_classes("regnet_x_32gf"),
    "RegNetX400MF": _of_1000_classes("regnet_x_400mf"),
    "RegNetY32GF": _of_1000_classes("regnet_y_32gf"),
    "RegNetY400MF": _of_1000_classes("regnet_y_400mf"),
    "ResNet101": _of_1000_classes("resnet101"),
    "ResNet152": _of_1000_classes("resnet152"),
    "ResNet50": _of_1000_classes("resnet50"),
    "VGG11": _of_1000_classes("vgg11"),
    "VGG16": _of_1000_classes("vgg16"),
    "VGG19": _of_1000_classes("vgg19"),
}
