"""Networks on graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .job import job
from .ways import Steps, Way

PYG = ("torch_geometric",)


def graphs(nodes: int = 100, edges: int = 400, steps: int = 3) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Features, edges and labels of random graphs."""
    return [
        (torch.randn(nodes, 16), torch.randint(0, nodes, (2, edges)), torch.randint(0, 7, (nodes,)))
        for _ in range(steps)
    ]


def node_classes(model: nn.Module, features: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of all nodes."""
    return F.cross_entropy(model(features, edges), labels)


class TwoLayers(nn.Module):
    """Two convolutions on graphs."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        return self.second(F.relu(self.first(features, edges)), edges)


@job("GCN of torch_geometric", needs=PYG)
def gcn(way: Way) -> Steps:
    from torch_geometric.nn import GCNConv

    return way.train(TwoLayers(GCNConv(16, 32), GCNConv(32, 7)), node_classes, graphs())
