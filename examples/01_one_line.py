"""One line trains a model within a budget; the loop, the loss and the optimizer stay as they are."""

import torch
import torch.nn.functional as F
from torch import nn

import overspill

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
)  # fmt: skip
model = overspill.compile(model, budget="68MiB")  # the one line

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
images, labels = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
for step in range(3):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")

plan = model.overspill.plans[0]
print(f"planned peak {plan.peak_bytes:,} bytes; the same step unmanaged {plan.unmanaged_peak_bytes:,} bytes")
