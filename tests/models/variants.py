"""Which built-in models differ from another one in nothing but a name, or in depth and width."""

import pytest

from overspill.models import names

ALIASES = {"vgg11", "vgg13", "vgg16", "vgg19", "vgg16-vdnn"}  # other names of vgg-a, vgg-b, vgg-d and vgg-e
LIKE_ANOTHER = {
    "vgg-b", "vgg-d", "vgg-e", "vgg116", "vgg216", "vgg316", "vgg416", "resnet34", "resnet101", "resnet152",
    "densenet161", "densenet169", "densenet201", "inception-v3-aux", "googlenet-aux", "seq2seq-varied",
}  # fmt: skip
"""Models that are longer or wider than another, but not of other parts."""
MODELS = [name for name in names() if name not in ALIASES]
OWN = [name for name in MODELS if name not in LIKE_ANOTHER]
OTHERS_LONG = [pytest.param(name, marks=pytest.mark.long if name in LIKE_ANOTHER else ()) for name in MODELS]
"""All models, those like another in the long suite."""


def others_long(*short: str) -> list[object]:
    """Models of parts of their own, all but the `short` ones in the long suite."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.long) for name in OWN]
