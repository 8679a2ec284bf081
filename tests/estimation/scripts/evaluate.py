"""Runs a model over a data set and counts."""
# ruff: noqa: T201

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda")
model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16 * 16, 10)).to(device)
model.eval()
loader = DataLoader(TensorDataset(torch.randn(400, 3, 16, 16), torch.randint(0, 10, (400,))), batch_size=40)
correct, seen = 0, 0
with torch.inference_mode():
    for images, labels in loader:
        output = model(images.to(device))
        correct += (output.argmax(1).cpu() == labels).sum().item()
        seen += len(labels)
        print(f"accuracy {correct / seen:.3f}")
