"""Two networks against each other, each with its optimizer; one of them steps more often."""
# ruff: noqa: T201, UP031

import sys

import torch
from torch import nn

critic_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1
device = torch.device("cuda:0")


def weights_init(m):
    if m.__class__.__name__.find("Conv") != -1:
        nn.init.normal_(m.weight, 0.0, 0.02)


generator = nn.Sequential(
    nn.ConvTranspose2d(100, 64, 4, 1, 0, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
    nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh(),
).to(device)  # fmt: skip
critic = nn.Sequential(
    nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(64, 1, 4, 1, 0), nn.Flatten()
).to(device)
generator.apply(weights_init)
critic.apply(weights_init)
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(16, 100, 1, 1, device=device)
optimizer_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
for i in range(50):
    for _ in range(critic_steps):
        critic.zero_grad()
        real = torch.randn(16, 3, 8, 8).to(device)
        label = torch.full((16, 1), 1.0, dtype=torch.float, device=device)
        error_real = criterion(critic(real), label)
        error_real.backward()
        fake = generator(torch.randn(16, 100, 1, 1, device=device))
        label.fill_(0.0)
        output = critic(fake.detach())
        error_fake = criterion(output, label)
        error_fake.backward()
        d_g_z1 = output.mean().item()
        optimizer_d.step()
    generator.zero_grad()
    label.fill_(1.0)
    error_g = criterion(critic(fake), label)
    error_g.backward()
    optimizer_g.step()
    print("[%d] Loss_D: %.4f Loss_G: %.4f" % (i, (error_real + error_fake).item(), error_g.item()))
    if i % 10 == 0:
        with torch.no_grad():
            print(generator(fixed_noise).detach().cpu().shape)
