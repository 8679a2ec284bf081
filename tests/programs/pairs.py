"""Models that compare: several inputs through one encoder, and graphs whose nodes look at their neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.programs.harness import Made, Memory, program
from torch import Tensor, nn


class Encoder(nn.Module):
    def __init__(self, width: int = 16, out: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
            nn.Linear(32 * width, out),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@program("siamese network: the compiled encoder is called twice a step")
def siamese(memory: Memory) -> Made:
    encoder = Encoder()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    encoder = memory.compile(encoder)
    for _ in range(3):
        one, other = encoder(torch.rand(32, 1, 28, 28)), encoder(torch.rand(32, 1, 28, 28))
        same = torch.randint(0, 2, (32,)).float()
        distance = F.pairwise_distance(one, other)
        loss = (same * distance.square() + (1 - same) * F.relu(1.0 - distance).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, encoder


class Twins(nn.Module):
    """Both images in one call, as in PyTorch's example."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.head(torch.cat([self.encoder(one), self.encoder(other)], dim=1)).squeeze(1)


def likeness(model: nn.Module, one: Tensor, other: Tensor, same: Tensor) -> Tensor:
    return F.binary_cross_entropy(model(one, other), same)


@program("siamese network: a module that calls its encoder twice", "compile", "train_step")
def twins(memory: Memory) -> Made:
    model = Twins()
    step = memory.step(model, likeness, torch.optim.Adadelta(model.parameters(), lr=1.0))
    for _ in range(3):
        same = torch.randint(0, 2, (32,)).float()
        yield step(torch.rand(32, 1, 28, 28), torch.rand(32, 1, 28, 28), same)
    yield model


class SimClr(nn.Module):
    """Two views of each image in one batch; each view is to find the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.projector = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, views: Tensor) -> Tensor:
        z = F.normalize(self.projector(self.encoder(views)), dim=1)
        scores = z @ z.T / 0.5
        scores = scores.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), float("-inf"))
        return F.cross_entropy(scores, torch.arange(len(z), device=z.device).roll(len(z) // 2))


@program("contrastive pairs: SimCLR, the loss in the model", "compile", "train_step")
def simclr(memory: Memory) -> Made:
    model = SimClr()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    step = memory.step(model, lambda model, views: model(views), optimizer)
    for _ in range(3):
        yield step(two_views(torch.rand(24, 1, 28, 28)))
    yield model


def two_views(images: Tensor) -> Tensor:
    return torch.cat([images + 0.1 * torch.randn_like(images), images.flip(3)])


@program("triplet loss: the compiled encoder is called three times a step")
def triplet(memory: Memory) -> Made:
    encoder = Encoder()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    criterion = nn.TripletMarginLoss(margin=0.5)
    encoder = memory.compile(encoder)
    for _ in range(3):
        anchor, positive, negative = (torch.rand(24, 1, 28, 28) for _ in range(3))
        loss = criterion(encoder(anchor), encoder(positive), encoder(negative))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, encoder


class DenseAttention(nn.Module):
    """Graph attention over an adjacency matrix."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Linear(inputs, outputs, bias=False)
        self.source, self.target = nn.Linear(outputs, 1, bias=False), nn.Linear(outputs, 1, bias=False)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.weight(F.dropout(x, 0.5, self.training))
        scores = F.leaky_relu(self.source(h) + self.target(h).T, 0.2)
        shares = torch.where(adjacency > 0, scores, torch.full_like(scores, -9e15)).softmax(dim=1)
        return F.dropout(shares, 0.5, self.training) @ h


class Gat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = DenseAttention(64, 32), DenseAttention(32, 7)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return F.log_softmax(self.second(F.elu(self.first(x, adjacency)), adjacency), dim=1)


@program("graph attention over a dense adjacency matrix")
def graph_attention(memory: Memory) -> Made:
    model = Gat()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    x, adjacency = torch.randn(512, 64), (torch.rand(512, 512) < 0.02).float() + torch.eye(512)
    labels, known = torch.randint(0, 7, (512,)), torch.arange(140)
    model = memory.compile(model)
    for _ in range(3):
        loss = F.nll_loss(model(x, adjacency)[known], labels[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model


class MessagePassing(nn.Module):
    """Messages along edges, gathered, and added up where they arrive."""

    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(16, width)
        self.messages = nn.ModuleList(nn.Sequential(nn.Linear(2 * width, width), nn.ReLU()) for _ in range(depth))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, edges: Tensor, graph_of: Tensor, graphs: int) -> Tensor:
        x = self.into(x)
        source, target = edges
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = message(torch.cat([x[source], x[target]], dim=1))
            arrived = torch.zeros_like(x).index_add(0, target, sent)
            x = torch.relu(update(torch.cat([x, arrived], dim=1)))
        pooled = x.new_zeros(graphs, x.shape[1]).scatter_add(0, graph_of[:, None].expand_as(x), x)
        return self.head(pooled).squeeze(1)


def property_loss(model: nn.Module, x: Tensor, edges: Tensor, graph_of: Tensor, wanted: Tensor) -> Tensor:
    return F.l1_loss(model(x, edges, graph_of, 16), wanted)


@program("message passing on graphs: index_add, scatter_add", "compile", "train_step")
def message_passing(memory: Memory) -> Made:
    model = MessagePassing()
    step = memory.step(model, property_loss, torch.optim.Adam(model.parameters(), lr=1e-3))
    for _ in range(3):
        graph_of = torch.arange(16).repeat_interleave(32)
        yield step(torch.randn(512, 16), torch.randint(0, 512, (2, 2048)), graph_of, torch.randn(16))
    yield model
