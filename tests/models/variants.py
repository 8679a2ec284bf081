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
DEEP = {
    "resnet50", "resnet32-cifar", "densenet121", "overfeat", "vgg-c", "googlenet", "inception-v3", "inception-v4", "inception-resnet-v2",
    "deeplabv3plus", "pix2pixhd", "bert-base", "seq2seq",
}  # fmt: skip
"""Models of many ops or large ones, whose parts others have too: they are trained in the long suite."""
OWN = [name for name in MODELS if name not in LIKE_ANOTHER]
OTHERS_LONG = [pytest.param(name, marks=pytest.mark.long if name in LIKE_ANOTHER else ()) for name in MODELS]
"""All models, those like another in the long suite."""

OTHERS_AND_DEEP_LONG = [
    pytest.param(name, marks=pytest.mark.long if name in LIKE_ANOTHER | DEEP else ()) for name in OWN
]
