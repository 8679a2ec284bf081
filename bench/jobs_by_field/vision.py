"""Images: classification, segmentation, detection."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .job import job
from .language import HF, own_loss
from .ways import Steps, Way

TIMM = ("timm",)


def labelled(size: int = 64, batch: int = 4, steps: int = 3, classes: int = 10) -> list[tuple[Tensor, Tensor]]:
    """Batches of images and their labels."""
    return [(torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))) for _ in range(steps)]


def classification(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(images), labels)


@job("ViT of transformers", needs=HF)
def vit(way: Way) -> Steps:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8,
        num_labels=10,
    )  # fmt: skip
    batches = [{"pixel_values": images, "labels": labels} for images, labels in labelled(32, 8)]
    return way.train(transformers.ViTForImageClassification(config), own_loss, batches)


@job("SegFormer", needs=HF)
def segformer(way: Way) -> Steps:
    import transformers

    config = transformers.SegformerConfig(
        hidden_sizes=[16, 32, 32, 32], num_attention_heads=[1, 2, 2, 2], depths=[1, 1, 1, 1], decoder_hidden_size=32,
        num_labels=4,
    )  # fmt: skip
    batches = [
        {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 4, (2, 64, 64))} for _ in range(3)
    ]
    return way.train(transformers.SegformerForSemanticSegmentation(config), own_loss, batches)


@job("ConvNeXt of timm", needs=TIMM)
def timm_convnext(way: Way) -> Steps:
    import timm

    return way.train(timm.create_model("convnext_atto", num_classes=10), classification, labelled())


@job("ViT of timm", needs=TIMM)
def timm_vit(way: Way) -> Steps:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=2, img_size=64)
    return way.train(model, classification, labelled())
