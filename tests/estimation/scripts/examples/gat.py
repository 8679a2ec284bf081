"""Graph attention on one graph: a dense adjacency made of edges, masks that split the nodes, accuracy of each part."""
# ruff: noqa: T201

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam

nodes, features, classes, edges = 300, 64, 7, 1200


class GraphAttentionLayer(nn.Module):
    def __init__(self, n_in, n_out, heads, concat=True):
        super().__init__()
        self.heads, self.concat, self.hidden = heads, concat, n_out // heads if concat else n_out
        self.W = nn.Parameter(torch.empty((n_in, self.hidden * heads)))
        self.a = nn.Parameter(torch.empty((heads, 2 * self.hidden, 1)))
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, h, adj_mat):
        n = h.shape[0]
        h = torch.mm(h, self.W)
        h = F.dropout(h, 0.6, training=self.training).view(n, self.heads, self.hidden).permute(1, 0, 2)
        source, target = h @ self.a[:, : self.hidden], h @ self.a[:, self.hidden :]
        e = F.leaky_relu(source + target.mT, 0.2)
        connectivity_mask = -9e16 * torch.ones_like(e)
        attention = F.softmax(torch.where(adj_mat > 0, e, connectivity_mask), dim=-1)
        h = F.dropout(attention, 0.6, training=self.training) @ h
        return h.permute(1, 0, 2).contiguous().view(n, -1) if self.concat else h.mean(dim=0)


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.gat1, self.gat2 = GraphAttentionLayer(features, 64, 8), GraphAttentionLayer(64, classes, 1, concat=False)

    def forward(self, x, adj_mat):
        x = F.elu(self.gat1(x, adj_mat))
        return F.log_softmax(self.gat2(x, adj_mat), dim=1)


def load_graph(device):
    at = torch.randint(0, nodes, (2, edges))
    adj_mat = torch.sparse_coo_tensor(at, torch.ones(edges), (nodes, nodes)).to_dense()
    adj_mat = adj_mat * adj_mat.T + torch.eye(nodes)
    x, labels = torch.rand(nodes, features), torch.randint(0, classes, (nodes,))
    return (x / x.sum(1, keepdim=True)).to(device), labels.to(device), adj_mat.to(device)


def test(model, criterion, inputs, target, mask):
    model.eval()
    with torch.no_grad():
        output = model(*inputs)[mask]
        target = target[mask]
        loss = criterion(output, target)
        acc = (output.argmax(dim=1) == target).float().sum() / len(target)
    return loss.item(), acc.item()


torch.manual_seed(13)
device = torch.device("cuda")
features_, labels, adj_mat = load_graph(device)
idx = torch.randperm(len(labels)).to(device)
idx_test, idx_val, idx_train = idx[:50], idx[50:100], idx[100:]
model, criterion = GAT().to(device), nn.NLLLoss()
optimizer = Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
best = 0.0
for epoch in range(300):
    start = time.time()
    model.train()
    optimizer.zero_grad()
    output = model(features_, adj_mat)
    loss = criterion(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    loss_train, acc_train = test(model, criterion, (features_, adj_mat), labels, idx_train)
    loss_val, acc_val = test(model, criterion, (features_, adj_mat), labels, idx_val)
    if acc_val > best:
        best = acc_val
        torch.save(model.state_dict(), "best.pt")
    print(
        f"Epoch {epoch + 1:04d} ({time.time() - start:.4f}s) acc_train: {acc_train:.4f} loss_val: {loss_val:.4f} acc_val: {acc_val:.4f}"
    )
