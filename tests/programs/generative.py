"""Models that make images: GAN, DCGAN, VAE, diffusion, autoencoder."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.programs.harness import Made, Memory, program
from torch import Tensor, nn


@program("GAN: two models, two optimizers, one budget")
def gan(memory: Memory) -> Made:
    generator = nn.Sequential(
        nn.Linear(32, 256), nn.LeakyReLU(0.2), nn.Linear(256, 512), nn.LeakyReLU(0.2), nn.Linear(512, 256), nn.Tanh()
    )
    critic = nn.Sequential(
        nn.Linear(256, 512),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Linear(512, 256),
        nn.LeakyReLU(0.2),
        nn.Linear(256, 1),
    )
    by_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    by_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    generator, critic = memory.together(generator, critic)
    ones, zeros = torch.ones(1024, 1), torch.zeros(1024, 1)
    for _ in range(4):
        real = torch.randn(1024, 256)
        fake = generator(torch.randn(1024, 32))

        by_critic.zero_grad()
        loss_real = F.binary_cross_entropy_with_logits(critic(real), ones)
        loss_real.backward()
        loss_fake = F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        loss_fake.backward()
        by_critic.step()

        by_generator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        loss.backward()
        by_generator.step()
        yield loss_real, loss_fake, loss, generator, critic


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 400), nn.ReLU())
        self.mean, self.logvar = nn.Linear(400, 20), nn.Linear(400, 20)
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.decoder(z)), mean, logvar


def vae_loss(model: nn.Module, x: Tensor) -> Tensor:
    reconstruction, mean, logvar = model(x)
    likelihood = F.binary_cross_entropy(reconstruction, x, reduction="sum")
    divergence = -0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())
    return likelihood + divergence


@program("VAE: reparameterization, two terms of loss", "compile", "train_step")
def vae(memory: Memory) -> Made:
    model = Vae()
    step = memory.step(model, vae_loss, torch.optim.Adam(model.parameters(), lr=1e-3))
    for _ in range(3):
        yield step(torch.rand(1024, 784))
    yield model


@program("DCGAN: transposed convolutions, batch norm, one budget", share=0.9)
def dcgan(memory: Memory) -> Made:
    def up(inputs: int, outputs: int) -> nn.Sequential:
        transposed = nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False)
        return nn.Sequential(transposed, nn.BatchNorm2d(outputs), nn.ReLU(True))

    def down(inputs: int, outputs: int) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, inplace=True))

    first = nn.Sequential(nn.ConvTranspose2d(32, 64, 4, 1, 0, bias=False), nn.BatchNorm2d(64), nn.ReLU(True))
    generator = nn.Sequential(first, up(64, 32), up(32, 16), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh())
    critic = nn.Sequential(down(3, 16), down(16, 32), down(32, 64), nn.Conv2d(64, 1, 4), nn.Flatten(0), nn.Sigmoid())
    for net in (generator, critic):
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                nn.init.normal_(module.weight, 0.0, 0.02)
    by_generator, by_critic = (
        torch.optim.Adam(net.parameters(), lr=2e-4, betas=(0.5, 0.999)) for net in (generator, critic)
    )
    generator, critic = memory.together(generator, critic)
    criterion = nn.BCELoss()
    for _ in range(4):
        label = torch.ones(64)
        critic.zero_grad()
        loss_real = criterion(critic(torch.randn(64, 3, 32, 32)), label)
        loss_real.backward()
        fake = generator(torch.randn(64, 32, 1, 1))
        label.fill_(0)
        loss_fake = criterion(critic(fake.detach()), label)
        loss_fake.backward()
        by_critic.step()

        generator.zero_grad()
        label.fill_(1)
        loss = criterion(critic(fake), label)
        loss.backward()
        by_generator.step()
        yield loss_real, loss_fake, loss, generator, critic


class Denoiser(nn.Module):
    """A small network that tells the noise in an image, given how noisy it is."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.into, self.out = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(4)
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = t[:, None].float() * frequencies[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))[:, :, None, None]
        x = self.into(x)
        for block in self.blocks:
            x = x + block(x + time)
        return self.out(x)


@program("diffusion: noise schedule, time embedding, loss outside")
def diffusion(memory: Memory) -> Made:
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), dim=0)
    model = memory.compile(model)
    for _ in range(3):
        images = torch.rand(16, 3, 32, 32) * 2 - 1
        t = torch.randint(0, 100, (16,))
        noise = torch.randn_like(images)
        share = kept[t][:, None, None, None]
        noisy = share.sqrt() * images + (1 - share).sqrt() * noise
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model


class Autoencoder(nn.Module):
    """The decoder uses the encoder's weights the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 256), nn.Linear(256, 64)
        self.bias = nn.Parameter(torch.zeros(512))

    def forward(self, x: Tensor) -> Tensor:
        code = torch.relu(self.second(torch.relu(self.first(x))))
        hidden = torch.relu(F.linear(code, self.second.weight.t()))
        return F.linear(hidden, self.first.weight.t(), self.bias)


def denoising_loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.smooth_l1_loss(model(x + 0.1 * torch.randn_like(x)), x)


@program("denoising autoencoder with tied weights", "compile", "train_step")
def tied_autoencoder(memory: Memory) -> Made:
    model = Autoencoder()
    step = memory.step(model, denoising_loss, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for _ in range(3):
        yield step(torch.randn(1024, 512))
    yield model
