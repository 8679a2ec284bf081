"""Generative models: diffusion, flows, variational autoencoders, adversaries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .job import job
from .ways import Steps, Way

DIFFUSERS = ("diffusers",)


class Vae(nn.Module):
    """An autoencoder that draws its code."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 32), nn.Linear(16, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, -1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decode(code), mean, log_variance


@job("VAE")
def vae(way: Way) -> Steps:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made, mean, log_variance = model(x)
        return F.mse_loss(made, x) - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()

    return way.train(Vae(), loss, [torch.randn(32, 64) for _ in range(3)])


@job("UNet2DConditionModel of diffusers", needs=DIFFUSERS)
def unet_conditioned(way: Way) -> Steps:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip

    def loss(model: nn.Module, noisy: Tensor, times: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(model(noisy, times, text).sample, noise)

    image = 2, 4, 16, 16
    batches = [
        (torch.randn(image), torch.randint(0, 1000, (2,)), torch.randn(2, 8, 32), torch.randn(image)) for _ in range(3)
    ]
    return way.train(model, loss, batches)
