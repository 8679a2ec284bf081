"""Tables and physics: recommenders, equations, forecasts."""

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


@job("DLRM with sparse gradients, and SGD, which takes them")
def dlrm_sparse(way: Way) -> Steps:
    model = Dlrm(sparse=True)
    return way.train(model, clicks, [visits(32) for _ in range(3)], torch.optim.SGD(model.parameters(), 0.1))


@job("two towers: users and items, the others of a batch as negatives")
def two_towers(way: Way) -> Steps:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = (
                nn.Sequential(nn.Embedding(500, 16), nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 16))
                for _ in range(2)
            )

        def forward(self, users: Tensor, items: Tensor) -> Tensor:
            return F.normalize(self.user(users), dim=-1) @ F.normalize(self.item(items), dim=-1).T / 0.1

    def loss(model: nn.Module, users: Tensor, items: Tensor) -> Tensor:
        return F.cross_entropy(model(users, items), torch.arange(len(users), device=users.device))

    batches = [(torch.randint(0, 500, (size, 3)), torch.randint(0, 500, (size, 3))) for size in (24, 24, 24, 9)]
    return way.train(Towers(), loss, batches)


@job("forecasts from windows with missing values, by a Transformer over patches")
def forecast(way: Way) -> Steps:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.trunk = nn.Linear(16, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(32, 8)

        def forward(self, series: Tensor) -> Tensor:
            there = ~series.isnan()
            filled = series.nan_to_num()
            mean = (filled * there).sum(-1, keepdim=True) / there.sum(-1, keepdim=True).clamp(min=1)
            patches = torch.cat([(filled - mean).unfold(-1, 8, 8), there.float().unfold(-1, 8, 8)], -1)
            return self.out(self.trunk(self.into(patches)).mean(1)) + mean

    def series() -> Tensor:
        made = torch.randn(8, 48)
        return made.masked_fill(torch.rand(8, 48) < 0.2, float("nan"))

    def loss(model: nn.Module, seen: Tensor, ahead: Tensor) -> Tensor:
        return F.huber_loss(model(seen), ahead)

    return way.train(Patches(), loss, [(series(), torch.randn(8, 8)) for _ in range(3)])


@job("PINN: derivatives by create_graph in the loss")
def pinn(way: Way) -> Steps:
    def residual(model: nn.Module, points: Tensor) -> Tensor:
        points = points.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        return (first[:, 1] - 0.01 * second[:, 0]).square().mean()

    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    return way.train(model, residual, [torch.randn(256, 2) for _ in range(3)], has_gradients=True)


@job("PINN: a Laplacian by torch.func.hessian and vmap")
def pinn_hessian(way: Way) -> Steps:
    from torch.func import functional_call, hessian, vmap

    def residual(model: nn.Module, points: Tensor) -> Tensor:
        weights = dict(model.named_parameters())

        def value(point: Tensor) -> Tensor:
            return functional_call(model, weights, (point,)).squeeze(-1)

        second = vmap(hessian(value))(points)
        return (second.diagonal(dim1=-2, dim2=-1).sum(-1) - points.sum(-1)).square().mean()

    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    return way.train(model, residual, [torch.randn(64, 2) for _ in range(3)], has_gradients=True)


@job("forces as the gradient of an energy (molecules)")
def forces(way: Way) -> Steps:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1))

        def forward(self, places: Tensor) -> Tensor:
            first, second = torch.triu_indices(places.shape[1], places.shape[1], 1, device=places.device)
            distance = (places[:, first] - places[:, second]).norm(dim=-1, keepdim=True)
            return self.pair(torch.exp(-((distance - torch.linspace(0, 3, 8, device=places.device)) ** 2))).sum((1, 2))

    def loss(model: nn.Module, places: Tensor, energies: Tensor, pulls: Tensor) -> Tensor:
        places = places.detach().requires_grad_()
        energy = model(places)
        (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return F.mse_loss(energy, energies) + F.mse_loss(-slope, pulls)

    batches = [(torch.randn(4, 6, 3), torch.randn(4), torch.randn(4, 6, 3)) for _ in range(3)]
    return way.train(Energy(), loss, batches, has_gradients=True)
