"""A siamese network on pairs, decided by a threshold: two towers with one set of weights, and accuracy by pairs."""
# ruff: noqa: T201

import random

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.fc = nn.Sequential(nn.Linear(128, 256), nn.ReLU(inplace=True), nn.Linear(256, 1))
        self.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            torch.nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward_once(self, x):
        output = self.features(x)
        return output.view(output.size()[0], -1)

    def forward(self, input1, input2):
        return torch.sigmoid(self.fc(torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)))


class Matcher(Dataset):
    """Pairs of one class or of two, grouped by class as they are read."""

    def __init__(self, count):
        self.data, targets = torch.rand(count, 28, 28), torch.arange(count) % 10
        self.grouped = {i: torch.where(targets == i)[0] for i in range(10)}

    def __len__(self):
        return self.data.shape[0]

    def __getitem__(self, index):
        chosen = random.randint(0, 9)
        one = self.data[random.choice(self.grouped[chosen]).item()]
        other = chosen if index % 2 == 0 else (chosen + 1) % 10
        two = self.data[random.choice(self.grouped[other]).item()]
        return one.unsqueeze(0), two.unsqueeze(0), torch.tensor(index % 2 == 0, dtype=torch.float)


def train(model, device, loader, optimizer, epoch):
    model.train()
    criterion = nn.BCELoss()
    for batch_idx, (images_1, images_2, targets) in enumerate(loader):
        images_1, images_2, targets = images_1.to(device), images_2.to(device), targets.to(device)  # noqa: PLW2901
        optimizer.zero_grad()
        loss = criterion(model(images_1, images_2).squeeze(), targets)
        loss.backward()
        optimizer.step()
        print(f"Train Epoch: {epoch} [{batch_idx}/{len(loader)}]\tLoss: {loss.item():.6f}")


def test(model, device, loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for images_1, images_2, targets in loader:
            images_1, images_2, targets = images_1.to(device), images_2.to(device), targets.to(device)  # noqa: PLW2901
            outputs = model(images_1, images_2).squeeze()
            test_loss += nn.BCELoss()(outputs, targets).sum().item()
            pred = torch.where(outputs > 0.5, 1, 0)
            correct += pred.eq(targets.view_as(pred)).sum().item()
    print(
        f"Average loss: {test_loss / len(loader.dataset):.4f}, Accuracy: {100.0 * correct / len(loader.dataset):.0f}%"
    )


device = torch.device("cuda")
train_loader = DataLoader(Matcher(64), shuffle=True, num_workers=1, pin_memory=True, batch_size=64)
test_loader = DataLoader(Matcher(100), batch_size=100)
model = SiameseNetwork().to(device)
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
for epoch in range(1, 15):
    train(model, device, train_loader, optimizer, epoch)
    test(model, device, test_loader)
    scheduler.step()
F.relu(torch.zeros(1))
