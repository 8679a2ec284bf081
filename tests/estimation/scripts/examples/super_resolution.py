"""Super-resolution by sub-pixel convolution, judged by PSNR, with a checkpoint of the whole model each epoch."""
# ruff: noqa: T201

from math import log10

import torch
from torch import nn, optim
from torch.nn import init
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        target = torch.rand(1, 64, 64)
        return nn.functional.avg_pool2d(target, 2), target


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1, self.conv2 = nn.Conv2d(1, 64, 5, 1, 2), nn.Conv2d(64, 64, 3, 1, 1)
        self.conv3, self.conv4 = nn.Conv2d(64, 32, 3, 1, 1), nn.Conv2d(32, upscale_factor**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        for layer in (self.conv1, self.conv2, self.conv3):
            init.orthogonal_(layer.weight, init.calculate_gain("relu"))

    def forward(self, x):
        x = self.relu(self.conv3(self.relu(self.conv2(self.relu(self.conv1(x))))))
        return self.pixel_shuffle(self.conv4(x))


device = torch.device("cuda")
training_data_loader = DataLoader(Photos(), num_workers=4, batch_size=8, shuffle=True)
testing_data_loader = DataLoader(Photos(), num_workers=4, batch_size=4)
model, criterion = Net(upscale_factor=2).to(device), nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=0.01)

for epoch in range(1, 4):
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        source, target = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        loss = criterion(model(source), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        print(f"===> Epoch[{epoch}]({iteration}/{len(training_data_loader)}): Loss: {loss.item():.4f}")
    avg_psnr = 0
    with torch.no_grad():
        for batch in testing_data_loader:
            source, target = batch[0].to(device), batch[1].to(device)
            mse = criterion(model(source), target)
            avg_psnr += 10 * log10(1 / mse.item())
    print(f"===> Avg. PSNR: {avg_psnr / len(testing_data_loader):.4f} dB")
    torch.save(model, f"model_epoch_{epoch}.pth")
