"""Losses over pairs: several calls of a model before one backward, negatives that are kept."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .job import job
from .language import HF, tokens
from .ways import Steps, Way


@job("CLIP, a padding mask", needs=HF)
def clip(way: Way) -> Steps:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 128, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 32, "patch_size": 8}, projection_dim=32,
    )  # fmt: skip

    def batch() -> dict[str, Tensor]:
        mask = torch.ones(4, 12, dtype=torch.long)
        mask[0, 8:] = 0
        return {"input_ids": tokens(4, 12), "attention_mask": mask, "pixel_values": torch.randn(4, 3, 32, 32)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch, return_loss=True).loss

    return way.train(transformers.CLIPModel(config), loss, [batch() for _ in range(3)])


def encoder() -> nn.Module:
    """A small network for images, with batch norm."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 16),
    )  # fmt: skip


def of_pairs(first: Tensor, second: Tensor) -> Tensor:
    """NT-Xent: each image of a pair is to be found from the other among all."""
    both = F.normalize(torch.cat([first, second]), dim=-1)
    likeness = (both @ both.T / 0.5).masked_fill(
        torch.eye(len(both), dtype=torch.bool, device=both.device), float("-inf")
    )
    return F.cross_entropy(likeness, torch.arange(len(both), device=both.device).roll(len(first)))


@job("SimCLR: two calls before a backward")
def simclr(way: Way) -> Steps:
    def loss(model: nn.Module, first: Tensor, second: Tensor) -> Tensor:
        return of_pairs(model(first), model(second))

    return way.train(encoder(), loss, [tuple(torch.randn(2, 8, 3, 16, 16)) for _ in range(3)])


@job("one contrastive loss over four calls' embeddings, a last short batch")
def accumulated_pairs(way: Way) -> Steps:
    def loss(model: nn.Module, *parts: Tensor) -> Tensor:
        found = torch.cat([model(part) for part in parts])
        return of_pairs(*found.chunk(2))

    batches = [tuple(torch.randn(4, size, 3, 16, 16)) for size in (6, 6, 6, 2)]
    return way.train(encoder(), loss, batches)


@job("MoCo: keys by an encoder that lags behind, and a queue of them in a buffer")
def moco(way: Way) -> Steps:
    class Moco(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = encoder()
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(32, 16), dim=-1))

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            queries = F.normalize(self.query(first), dim=-1)
            with torch.no_grad():
                for late, now in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    late.lerp_(now, 0.01)
                keys = F.normalize(self.key(second), dim=-1)
            scores = torch.cat([(queries * keys).sum(-1, keepdim=True), queries @ self.queue.clone().T], 1) / 0.2
            self.queue.copy_(torch.cat([keys, self.queue[: -len(keys)]]))
            return F.cross_entropy(scores, scores.new_zeros(len(scores), dtype=torch.long))

    batches = [tuple(torch.randn(2, 8, 3, 16, 16)) for _ in range(3)]
    return way.train(Moco(), lambda model, first, second: model(first, second), batches)


@job("triplets, the hardest of a batch mined by value")
def triplets(way: Way) -> Steps:
    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        found = F.normalize(model(images), dim=-1)
        distance = torch.cdist(found, found)
        same = labels[:, None] == labels
        farthest = distance.masked_fill(~same, 0).amax(1)
        nearest = distance.masked_fill(same, 10).amin(1)
        active = farthest - nearest + 0.5 > 0
        return (farthest - nearest + 0.5)[active].mean()

    batches = [(torch.randn(12, 3, 16, 16), torch.randint(0, 3, (12,))) for _ in range(3)]
    return way.train(encoder(), loss, batches)
