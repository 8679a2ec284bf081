"""The table of built-in models, and loading one by name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from pathlib import Path

from overspill.core.errors import RequestError
from overspill.core.registry import Registry, did_you_mean

from .built_model import BuiltModel
from .configuration import SHORT
from .configured import check_configured, full_name, is_configured, load_configured

_DEEPER = "configuration E with {more} more convolutions in each of its five groups (vDNN, section IV-C)"


@dataclass(frozen=True)
class Entry:
    """One built-in model: its description and where it is built."""

    name: str
    family: str
    summary: str
    batch_input: str
    builder: str
    """`module:function`, called as `function(name, small=, size=)`.

    The module is one of this package, or with a dot any other.
    """
    size_option: str
    """The name of the option that gives `size`."""


def images(family: str, builder: str, name: str, summary: str, *, size: int = 224) -> Entry:
    """Return the entry of a model that reads square images of side `size` by default."""
    return Entry(name, family, summary, f"images 3x{size}x{size}", builder, "image_size")


def tokens(family: str, builder: str, name: str, summary: str, *, size: int) -> Entry:
    """Return the entry of a model that reads sequences of `size` tokens by default."""
    return Entry(name, family, summary, f"{size} tokens", builder, "seq_len")


def _vgg(name: str, summary: str) -> Entry:
    return images("VGG", "vgg:build", name, summary)


def _resnet(depth: int, millions: str) -> Entry:
    return images(
        "ResNet", "resnet:build", f"resnet{depth}", f"residual network of {depth} layers, {millions} M parameters"
    )


_ENTRIES = (
    images(
        "AlexNet", "alexnet:build", "alexnet", "5 convolutions in one tower (torchvision's sizes), 61.1 M parameters"
    ),
    _vgg("vgg-a", "configuration A: 8 convolutions, 132.9 M parameters"),
    _vgg("vgg-b", "configuration B: 10 convolutions, 133.0 M parameters"),
    _vgg("vgg-c", "configuration C: 13 convolutions, three of them 1x1, 133.6 M parameters"),
    _vgg("vgg-d", "configuration D: 13 convolutions, 138.4 M parameters; what torchvision calls vgg16"),
    _vgg("vgg-e", "configuration E: 16 convolutions, 143.7 M parameters; what torchvision calls vgg19"),
    _vgg("vgg11", "the same as vgg-a"),
    _vgg("vgg13", "the same as vgg-b"),
    _vgg("vgg16", "the same as vgg-d"),
    _vgg("vgg19", "the same as vgg-e"),
    _vgg("vgg16-vdnn", "the papers' VGG-16: 16 convolutions, torchvision's VGG-19 (the same as vgg-e)"),
    _vgg("vgg116", _DEEPER.format(more=20)),
    _vgg("vgg216", _DEEPER.format(more=40)),
    _vgg("vgg316", _DEEPER.format(more=60)),
    _vgg("vgg416", _DEEPER.format(more=80)),
    _resnet(18, "11.7"),
    _resnet(34, "21.8"),
    _resnet(50, "25.6"),
    _resnet(101, "44.5"),
    _resnet(152, "60.2"),
    images(
        "ResNet", "resnet:build_cifar", "resnet32-cifar",
        "residual network of 32 layers for CIFAR-10, 0.46 M parameters", size=32
    ),
    images(
        "U-Net", "unet:build", "unet",
        "U-Net with padded convolutions, 2 classes per pixel, 31.0 M parameters", size=256
    ),
    tokens("LSTM", "lstm:build", "lstm", "language model of 2 LSTM layers of 650 units, 19.8 M parameters", size=35),
    tokens("GPT-2", "gpt2:build", "gpt2", "decoder of 12 layers, 124.4 M parameters", size=512),
    tokens(
        "BERT", "bert:build", "bert-base", "encoder of 12 layers, 109.5 M parameters; needs transformers", size=128
    ),
)  # fmt: skip
_PAPERS = (
    "deeplabv3plus", "densenet121", "densenet161", "densenet169", "densenet201", "googlenet", "googlenet-aux",
    "inception-resnet-v2", "inception-v3", "inception-v3-aux", "inception-v4", "overfeat", "pix2pixhd", "seq2seq",
    "seq2seq-varied",
)  # fmt: skip
MODELS: Registry[Entry] = Registry("model", "models", {entry.name: entry for entry in _ENTRIES}, _PAPERS)


def names() -> tuple[str, ...]:
    """Return the names of all built-in models, aliases included, family by family."""
    return tuple(MODELS)


def describe() -> list[Entry]:
    """Return the entries of all built-in models, aliases included, family by family."""
    return list(MODELS.values())


def load(name: str, *, small: bool = False, image_size: int | None = None, seq_len: int | None = None) -> BuiltModel:
    """Return a model by name: built in, configured, or the user's.

    A configured name has a form of `configured.FORMS`, a user's is `package.module:callable`. `small` is the same
    structure with few channels and small inputs, for tests. Raises RequestError.
    """
    for option, size in (("image_size", image_size), ("seq_len", seq_len)):
        if size is not None and size < 1:
            raise RequestError(f"{option}={size} is not a size; give 1 or more")
    # Models that are not built in.
    if is_configured(name):
        if small:
            raise RequestError(
                f"small= does not apply to {name}, whose name gives its sizes; leave it out, and change the name"
            )
        return load_configured(name, seq_len, image_size)
    if ":" in name:
        if small:
            raise RequestError(
                f"{name} is your own model, and only built-in ones have a small configuration; leave small= out"
            )
        from .user import load_user  # noqa: PLC0415  # imports torch

        return load_user(name, image_size=image_size, seq_len=seq_len)
    entry = _entry(name)
    # A built-in one reads images or tokens, not both.
    sizes = {"image_size": image_size, "seq_len": seq_len}
    size = sizes.pop(entry.size_option)
    for option, other in sizes.items():
        if other is not None:
            raise RequestError(
                f"{option}= does not apply to {name}, which reads {entry.batch_input}; use {entry.size_option}="
            )
    module, function = entry.builder.split(":")
    build = getattr(importlib.import_module(module if "." in module else f"{__package__}.{module}"), function)
    job: BuiltModel = build(name, small=small, size=size)
    if Path(f"{name}.py").is_file():  # which somebody who is here may mean
        return replace(job, assumed=f"{name} is the built-in model; one of your {name}.py is {name}:FUNCTION")
    return job


def checked_name(name: str) -> str:
    """Return `name` in full. Raises RequestError for a name of no model; torch is not imported."""
    full = name if name in MODELS else full_name(name)
    if is_configured(full):
        check_configured(full)
    elif ":" not in full:
        _entry(full)
    return full


def _entry(name: str) -> Entry:
    """Return the entry of this name. The error for an unknown one suggests a close name."""
    if name in MODELS:
        return MODELS[name]
    MODELS.check_installed(name)
    raise RequestError(
        f"unknown model {name!r}{did_you_mean(name, (*MODELS, *SHORT), most=3)} `overspill models` lists all, and "
        "`package.module:callable` names your own"
    )
