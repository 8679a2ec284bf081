"""The same through PyTorch's own door: torch.compile with the backend's name. Works for any loop and trainer."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1))
options = {"budget": "24MiB", "policy": "auto", "store": "host"}
compiled = torch.compile(model, backend="overspill", options=options, dynamic=False)

optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
inputs = torch.randn(512, 256)
for step in range(3):
    optimizer.zero_grad()
    loss = compiled(inputs).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.6f}")
