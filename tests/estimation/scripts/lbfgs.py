"""LBFGS, whose step calls a closure many times and asks whether it has converged."""
# ruff: noqa: T201

import sys

import torch
from torch import nn

search = sys.argv[1] if len(sys.argv) > 1 else None
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4, history_size=10, line_search_fn=search)
x, y = torch.randn(128, 64, device="cuda"), torch.randn(128, 1, device="cuda")
for i in range(15):

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    print("STEP:", i, "loss:", loss.item())
