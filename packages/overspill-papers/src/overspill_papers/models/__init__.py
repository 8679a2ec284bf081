"""Networks that papers measured, and that no other part needs."""

from overspill.models.registry import Entry, images, tokens

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
    (
        "label maps to images: global generator and 3 discriminators in one loss, 191.0 M parameters; image_size is "
        "the height"
    ),
    "label maps 36x512x1024, images 3x512x1024",
    f"{__name__}.pix2pixhd:build",
    "image_size",
)


def _inception(name: str, summary: str) -> Entry:
    return images("Inception", f"{__name__}.inception:build", name, summary, size=299)


INCEPTION_V3 = _inception("inception-v3", "factorised Inception with batch norm, 23.8 M parameters")
INCEPTION_V3_AUX = _inception("inception-v3-aux", "inception-v3 with its auxiliary classifier, 27.2 M parameters")
INCEPTION_V4 = _inception("inception-v4", "deeper and more uniform than v3, 42.7 M parameters")
INCEPTION_RESNET_V2 = _inception("inception-resnet-v2", "Inception blocks as residual branches, 55.8 M parameters")


def _densenet(depth: int, millions: str) -> Entry:
    summary = f"densely connected network of {depth} layers, {millions} M parameters"
    return images("DenseNet", f"{__name__}.densenet:build", f"densenet{depth}", summary)


DENSENET121 = _densenet(121, "8.0")
DENSENET161 = _densenet(161, "28.7")
DENSENET169 = _densenet(169, "14.1")
DENSENET201 = _densenet(201, "20.0")
SEQ2SEQ = tokens(
    "Seq2seq",
    f"{__name__}.seq2seq:build",
    "seq2seq",
    "translation by 4 + 4 LSTM layers with attention, 221.1 M parameters",
    size=50,
)
SEQ2SEQ_VARIED = tokens(
    "Seq2seq",
    f"{__name__}.seq2seq:build_varied",
    "seq2seq-varied",
    "seq2seq on sentences of varied lengths, each batch padded to its longest; seq_len is the most",
    size=50,
)
