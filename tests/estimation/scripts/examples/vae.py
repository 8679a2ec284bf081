"""A variational autoencoder: samples and reconstructions are saved as images after each epoch, as their authors do."""
# ruff: noqa: T201

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(1)
device = torch.device("cuda")
digits = TensorDataset(torch.rand(2 * args.batch_size, 1, 28, 28), torch.randint(0, 10, (2 * args.batch_size,)))
train_loader = DataLoader(digits, batch_size=args.batch_size, shuffle=True, num_workers=1, pin_memory=True)
test_loader = DataLoader(digits, batch_size=args.batch_size, num_workers=1, pin_memory=True)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 784))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def save_image(tensor, path, nrow=8):
    rows = [torch.cat(list(row), 1) for row in tensor[:, 0].split(nrow) if len(row) == nrow]
    grid = torch.cat(rows).mul(255).add_(0.5).clamp_(0, 255).to("cpu", torch.uint8).numpy()
    Image.fromarray(grid).save(path)


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data, _) in enumerate(train_loader):
        data = data.to(device)  # noqa: PLW2901
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        print(f"Train Epoch: {epoch} [{batch_idx * len(data)}]\tLoss: {loss.item() / len(data):.6f}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}")


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for i, (data, _) in enumerate(test_loader):
            data = data.to(device)  # noqa: PLW2901
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
            if i == 0:
                n = min(data.size(0), 8)
                comparison = torch.cat([data[:n], recon_batch.view(args.batch_size, 1, 28, 28)[:n]])
                save_image(comparison.cpu(), f"results/reconstruction_{epoch}.png", nrow=n)
    assert np.isfinite(test_loss)
    print(f"====> Test set loss: {test_loss / len(test_loader.dataset):.4f}")


Path("results").mkdir(exist_ok=True)
for epoch in range(1, args.epochs + 1):
    train(epoch)
    test(epoch)
    with torch.no_grad():
        sample = model.decode(torch.randn(64, 20).to(device)).cpu()
        save_image(sample.view(64, 1, 28, 28), f"results/sample_{epoch}.png")
