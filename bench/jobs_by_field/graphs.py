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


@job("GAT of torch_geometric, with its dropout", needs=PYG)
def gat(way: Way) -> Steps:
    from torch_geometric.nn import GATConv

    return way.train(TwoLayers(GATConv(16, 8, heads=4, dropout=0.2), GATConv(32, 7)), node_classes, graphs())


@job("GIN of torch_geometric with batch norm, on batches of graphs", needs=PYG)
def gin(way: Way) -> Steps:
    from torch_geometric.nn import GINConv, global_add_pool

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = TwoLayers(GINConv(self._mlp(16, 32)), GINConv(self._mlp(32, 7)))

        @staticmethod
        def _mlp(into: int, out: int) -> nn.Module:
            return nn.Sequential(nn.Linear(into, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, out))

        def forward(self, features: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
            return global_add_pool(self.layers(features, edges), graph, 10)

    def loss(model: nn.Module, features: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(features, edges, torch.arange(100, device=edges.device) // 10), labels[:10])

    return way.train(Pooled(), loss, graphs())


@job("GraphSAGE of torch_geometric", needs=PYG)
def graph_sage(way: Way) -> Steps:
    from torch_geometric.nn import SAGEConv

    return way.train(TwoLayers(SAGEConv(16, 32), SAGEConv(32, 7)), node_classes, graphs())


class Passing(nn.Module):
    """Messages over edges without self loops, and one self loop a node, weighted by degree."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(into, out)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        nodes = len(features)
        edges = edges[:, edges[0] != edges[1]]  # so many as there are
        edges = torch.cat([edges, torch.arange(nodes, device=edges.device).expand(2, -1)], 1)
        source, target = edges
        degree = features.new_zeros(nodes).scatter_add(0, target, features.new_ones(edges.shape[1]))
        weight = (degree[source] * degree[target]).rsqrt()
        messages = self.linear(features)[source] * weight[:, None]
        return messages.new_zeros(nodes, messages.shape[1]).index_add(0, target, messages)


@job("message passing of one's own, self loops taken out by a mask")
def message_passing(way: Way) -> Steps:
    return way.train(TwoLayers(Passing(16, 32), Passing(32, 7)), node_classes, graphs())


@job("edges of nearest neighbours, found from positions in the step (point clouds)")
def point_cloud(way: Way) -> Steps:
    class EdgeConvolution(nn.Module):
        def __init__(self, into: int, out: int) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(2 * into, out), nn.BatchNorm1d(out), nn.LeakyReLU(0.2))

        def forward(self, x: Tensor) -> Tensor:
            near = torch.cdist(x, x).topk(4, largest=False).indices
            around = x[torch.arange(len(x))[:, None, None], near]
            pairs = torch.cat([x[:, :, None].expand_as(around), around - x[:, :, None]], -1)
            return self.mlp(pairs.flatten(0, 2)).unflatten(0, pairs.shape[:3]).amax(2)

    model = nn.Sequential(EdgeConvolution(3, 16), EdgeConvolution(16, 32), nn.Linear(32, 5))

    def loss(model: nn.Module, points: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(points).amax(1), labels)

    return way.train(model, loss, [(torch.randn(4, 24, 3), torch.randint(0, 5, (4,))) for _ in range(3)])
