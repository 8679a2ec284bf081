"""An ordinary training script, which knows nothing of Overspill; example 04 estimates it."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train a small network on random digits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digits = TensorDataset(torch.randn(4096, 1, 28, 28), torch.randint(0, 10, (4096,)))
    loader = DataLoader(digits, arguments.batch_size, shuffle=True, num_workers=4, pin_memory=True)
    for epoch in range(arguments.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device, non_blocking=True)), labels.to(device))
            if not torch.isfinite(loss):
                raise RuntimeError(f"the loss is {loss.item()}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
