"""Networks that papers measured, and that nothing else here needs."""

from overspill.models.registry import Entry, images

OVERFEAT = images(
    "OverFeat",
    f"{__name__}.overfeat:build",
    "overfeat",
    "the fast model: 5 convolutions, no dropout, 145.9 M parameters",
    size=231,
)
GOOGLENET = images(
    "GoogLeNet", f"{__name__}.googlenet:build", "googlenet", "Inception v1 without batch norm, 7.0 M parameters"
)
GOOGLENET_AUX = images(
    "GoogLeNet",
    f"{__name__}.googlenet:build",
    "googlenet-aux",
    "googlenet with its two auxiliary classifiers, 13.4 M parameters",
)
DEEPLABV3PLUS = images(
    "DeepLab",
    f"{__name__}.deeplab:build",
    "deeplabv3plus",
    "DeepLab v3+ on an atrous ResNet-101, 21 classes per pixel, 59.3 M parameters",
    size=513,
)
PIX2PIXHD = Entry(
    "pix2pixhd",
    "pix2pixHD",
    "label maps to images: global generator and 3 discriminators in one loss, 191.0 M parameters; image_size is the height",
    "label maps 36x512x1024, images 3x512x1024",
    f"{__name__}.pix2pixhd:build",
    "image_size",
)
