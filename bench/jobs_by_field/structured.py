"""Tables and physics: recommenders, equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .job import job
from .ways import Steps, Way


class Dlrm(nn.Module):
    """Bags of embeddings beside dense features, and the products of all pairs."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(1000, 16, mode="sum", sparse=sparse) for _ in range(4))
        self.bottom = nn.Linear(13, 16)
        self.top = nn.Sequential(nn.Linear(16 + 10, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, ids: list[Tensor]) -> Tensor:
        vectors = torch.stack([self.bottom(dense), *(bag(i) for bag, i in zip(self.bags, ids, strict=True))], 1)
        pairs = vectors @ vectors.mT
        rows, columns = torch.tril_indices(5, 5, -1)
        return self.top(torch.cat([vectors[:, 0], pairs[:, rows, columns]], 1)).squeeze(1)


def clicks(model: nn.Module, dense: Tensor, ids: list[Tensor], labels: Tensor) -> Tensor:
    """The loss of clicks that are or are not."""
    return F.binary_cross_entropy_with_logits(model(dense, ids), labels)


def visits(batch: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """A batch of a recommender."""
    return torch.randn(batch, 13), [torch.randint(0, 1000, (batch, 3)) for _ in range(4)], torch.rand(batch).round()


@job("DLRM, a last short batch")
def dlrm(way: Way) -> Steps:
    return way.train(Dlrm(), clicks, [visits(batch) for batch in (32, 32, 32, 7)])


@job("PINN: derivatives by create_graph in the loss")
def pinn(way: Way) -> Steps:
    def residual(model: nn.Module, points: Tensor) -> Tensor:
        points = points.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        return (first[:, 1] - 0.01 * second[:, 0]).square().mean()

    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return way.train(model, residual, [torch.randn(256, 2) for _ in range(3)])
