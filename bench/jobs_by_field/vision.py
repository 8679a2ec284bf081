"""Images: classification, segmentation, detection."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .job import job
from .language import HF, own_loss
from .ways import Steps, Way

TIMM, TORCHVISION = ("timm",), ("torchvision",)


def labelled(size: int = 64, batch: int = 4, steps: int = 3, classes: int = 10) -> list[tuple[Tensor, Tensor]]:
    """Batches of images and their labels."""
    return [(torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))) for _ in range(steps)]


def classification(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(images), labels)


@job("ViT of transformers", needs=HF, deep=12)
def vit(way: Way, layers: int = 3) -> Steps:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=128, image_size=32,
        patch_size=8, num_labels=10,
    )  # fmt: skip
    batches = [{"pixel_values": images, "labels": labels} for images, labels in labelled(32, 8)]
    return way.train(transformers.ViTForImageClassification(config), own_loss, batches)


@job("SegFormer", needs=HF)
def segformer(way: Way, *, evaluated: bool = False) -> Steps:
    import transformers

    config = transformers.SegformerConfig(
        hidden_sizes=[16, 32, 32, 32], num_attention_heads=[1, 2, 2, 2], depths=[1, 1, 1, 1], decoder_hidden_size=32,
        num_labels=4,
    )  # fmt: skip
    batches = [
        {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 4, (2, 64, 64))} for _ in range(3)
    ]
    model = transformers.SegformerForSemanticSegmentation(config)
    if evaluated:
        with torch.no_grad():
            model.eval()(**batches[0])
    return way.train(model, own_loss, batches)


@job("SegFormer, evaluated before it is trained", needs=HF)
def segformer_evaluated(way: Way) -> Steps:
    return segformer(way, evaluated=True)


@job("ConvNeXt of timm", needs=TIMM)
def timm_convnext(way: Way) -> Steps:
    import timm

    return way.train(timm.create_model("convnext_atto", num_classes=10), classification, labelled())


@job("ViT of timm", needs=TIMM)
def timm_vit(way: Way) -> Steps:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=2, img_size=64)
    return way.train(model, classification, labelled())


@job("Swin of timm", needs=TIMM)
def timm_swin(way: Way) -> Steps:
    import timm

    model = timm.create_model(
        "swin_tiny_patch4_window7_224", num_classes=10, depths=(2, 1, 1, 1), embed_dim=24, img_size=112
    )
    return way.train(model, classification, labelled(112, 2))


@job("MaxViT of timm", needs=TIMM)
def timm_maxvit(way: Way) -> Steps:
    import timm

    model = timm.create_model("maxvit_rmlp_pico_rw_256", num_classes=10, img_size=64)
    return way.train(model, classification, labelled(64, 2))


@job("EfficientNet of timm, with its drop path and dropout", needs=TIMM)
def timm_efficientnet(way: Way) -> Steps:
    import timm

    model = timm.create_model("efficientnet_b0", num_classes=10, drop_rate=0.2, drop_path_rate=0.2)
    return way.train(model, classification, labelled())


@job("ResNet-18 of torchvision in channels-last, SGD with momentum, a last short batch", needs=TORCHVISION)
def resnet(way: Way) -> Steps:
    import torchvision

    model = torchvision.models.resnet18(num_classes=10).to(memory_format=torch.channels_last)
    batches = [
        (images.to(memory_format=torch.channels_last), labels)
        for images, labels in [*labelled(), *labelled(batch=2, steps=1)]
    ]
    return way.train(model, classification, batches, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))


class Atrous(nn.Module):
    """Dilated convolutions side by side over a small trunk, and bilinear upsampling (DeepLab v3)."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32),
            nn.ReLU(),
        )  # fmt: skip
        self.rates = nn.ModuleList(nn.Conv2d(32, 16, 3, padding=rate, dilation=rate) for rate in (1, 2, 4))
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 16, 1), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Conv2d(64, classes, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.trunk(images)
        pooled = F.interpolate(self.pooled(x), x.shape[-2:], mode="bilinear")
        found = self.head(torch.cat([*(rate(x).relu() for rate in self.rates), pooled], 1))
        return F.interpolate(found, images.shape[-2:], mode="bilinear", align_corners=False)


@job("segmentation with dilated convolutions (DeepLab v3) and ignored pixels")
def deeplab(way: Way) -> Steps:
    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels, ignore_index=4)

    return way.train(Atrous(), loss, [(torch.randn(2, 3, 48, 48), torch.randint(0, 5, (2, 48, 48))) for _ in range(3)])


@job("U-Net of segmentation_models_pytorch with its Dice loss", needs=("segmentation_models_pytorch", "timm"))
def smp_unet(way: Way) -> Steps:
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", encoder_weights=None, classes=4, decoder_channels=(64, 32, 16, 16, 8))
    dice = smp.losses.DiceLoss("multiclass")
    batches = [(torch.randn(2, 3, 64, 64), torch.randint(0, 4, (2, 64, 64))) for _ in range(3)]
    return way.train(model, lambda model, images, labels: dice(model(images), labels), batches)


class Queries(nn.Module):
    """Objects as queries of a decoder over a small trunk (DETR)."""

    def __init__(self, queries: int = 6) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(3, 32, 8, 8)
        self.place, self.queries = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.randn(queries, 32))
        self.both = nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.classes, self.boxes = nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(images).flatten(2).mT + self.place
        found = self.both(x, self.queries.expand(len(x), -1, -1))
        return self.classes(found), self.boxes(found).sigmoid()


@job("DETR: predictions are matched with objects in Python within the loss")
def detr(way: Way) -> Steps:
    def matched(cost: list[list[float]]) -> tuple[int, ...]:
        """The cheapest prediction for each object; with six of them, by trying all."""
        objects = range(len(cost[0]))
        return min(
            permutations(range(len(cost)), len(objects)), key=lambda rows: sum(cost[r][o] for o, r in enumerate(rows))
        )

    def loss(model: nn.Module, images: Tensor, labels: Tensor, boxes: Tensor) -> Tensor:
        classes, found = model(images)
        with torch.no_grad():
            cost = torch.cdist(found, boxes, p=1)
        total = torch.zeros(())
        for image, of_image in enumerate(cost):
            rows = torch.tensor(matched(of_image.tolist()))
            total = total + F.cross_entropy(classes[image, rows], labels[image])
            total = total + F.l1_loss(found[image, rows], boxes[image])
        return total

    batches = [(torch.randn(2, 3, 32, 32), torch.randint(0, 4, (2, 3)), torch.rand(2, 3, 4)) for _ in range(3)]
    return way.train(Queries(), loss, batches)


@job("RetinaNet of torchvision", needs=TORCHVISION)
def retinanet(way: Way) -> Steps:
    import torchvision

    trunk = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU())
    trunk.out_channels = 32
    anchors = torchvision.models.detection.anchor_utils.AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    model = torchvision.models.detection.RetinaNet(
        trunk, num_classes=4, anchor_generator=anchors, min_size=64, max_size=64
    )

    def loss(model: nn.Module, images: list[Tensor], objects: list[dict[str, Tensor]]) -> Tensor:
        return sum(model(images, objects).values())

    box = torch.tensor([[5.0, 8.0, 40.0, 50.0]])
    batches = [
        ([torch.rand(3, 64, 64)] * 2, [{"boxes": box, "labels": torch.tensor([label])} for label in (1, 2)])
        for _ in range(3)
    ]
    return way.train(model, loss, batches)


@job("super-resolution: PixelShuffle, and targets of nine times the size")
def super_resolution(way: Way) -> Steps:
    model = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 9, 3, padding=1), nn.PixelShuffle(3),
    )  # fmt: skip
    batches = [(torch.rand(4, 1, 24, 24), torch.rand(4, 1, 72, 72)) for _ in range(3)]
    return way.train(model, lambda model, small, large: F.mse_loss(model(small), large), batches)


def stages(width: int = 16, count: int = 3, **norm: Any) -> list[nn.Module]:
    """Convolutions with batch norm."""
    return [
        nn.Sequential(nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width, **norm), nn.ReLU(inplace=True))
        for inputs in (3, *[width] * (count - 1))
    ]


@job("deep supervision: three heads, three losses")
def deep_supervision(way: Way) -> Steps:
    class WithHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(stages())
            self.heads = nn.ModuleList(nn.Linear(16, 10) for _ in self.stages)

        def forward(self, x: Tensor) -> list[Tensor]:
            found = []
            for stage, head in zip(self.stages, self.heads, strict=True):
                x = stage(x)
                found.append(head(x.mean((2, 3))))
                x = F.avg_pool2d(x, 2)
            return found

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        *others, last = (F.cross_entropy(logits, labels) for logits in model(images))
        return last + 0.3 * sum(others)

    return way.train(WithHeads(), loss, labelled(32))


@job("BatchNorm(momentum=None): a plain average of all batches")
def cumulative_batch_norm(way: Way) -> Steps:
    model = nn.Sequential(*stages(momentum=None), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return way.train(model, classification, labelled(32))
