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


@job("Flux of diffusers, flow matching, in bfloat16 by autocast", needs=DIFFUSERS)
def flux(way: Way) -> Steps:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    text_places, places = torch.zeros(6, 3), torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))

    def loss(model: nn.Module, image: Tensor, noise: Tensor, text: Tensor, pooled: Tensor, time: Tensor) -> Tensor:
        mixed = torch.lerp(image, noise, time[:, None, None])
        with torch.autocast("cpu", torch.bfloat16):
            flow = model(
                mixed, encoder_hidden_states=text, pooled_projections=pooled, timestep=time, img_ids=places,
                txt_ids=text_places,
            ).sample  # fmt: skip
        return F.mse_loss(flow.float(), noise - image)

    batches = [(*torch.randn(2, 2, 16, 8), torch.randn(2, 6, 32), torch.randn(2, 32), torch.rand(2)) for _ in range(3)]
    return way.train(model, loss, batches)


class DiffusionBlock(nn.Module):
    """A block of a diffusion transformer: shifts, scales and gates by the time."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulate = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulate(time)[:, None].chunk(6, -1)
        parts = self.into(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(0)).transpose(1, 2).flatten(2)
        x = x + gate * self.out(attended)
        return x + gate_mlp * self.mlp(self.norm(x) * (1 + scale_mlp) + shift_mlp)


@job("diffusion transformer, flow matching, times and noise drawn in the loss", deep=24)
def diffusion_transformer(way: Way, layers: int = 3) -> Steps:
    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.time, self.out = nn.Linear(8, 32), nn.Linear(1, 32), nn.Linear(32, 8)
            self.blocks = nn.ModuleList(DiffusionBlock() for _ in range(layers))

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            x, time = self.into(x), self.time(time[:, None])
            for block in self.blocks:
                x = block(x, time)
            return self.out(x)

    def loss(model: nn.Module, image: Tensor) -> Tensor:
        noise, time = torch.randn_like(image), torch.rand(len(image), device=image.device).sigmoid()
        return F.mse_loss(model(torch.lerp(image, noise, time[:, None, None]), time), noise - image)

    return way.train(Transformer(), loss, [torch.randn(4, 16, 8) for _ in range(3)])


def adversaries() -> tuple[nn.Module, nn.Module]:
    """A generator with batch norm, and a critic."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1),
        nn.Tanh(),
    )
    critic = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
        nn.Linear(32 * 16, 1),
    )  # fmt: skip
    return generator, critic


@job("GAN: a generator and a discriminator in turn, one budget")
def gan(way: Way) -> Steps:
    generator, critic = adversaries()
    way.together(generator, critic)
    generates, judges = way.called(generator), way.called(critic)

    def told_apart(model: nn.Module, real: Tensor, code: Tensor) -> Tensor:
        with torch.no_grad():
            made = generates(code)
        return F.softplus(-model(real)).mean() + F.softplus(model(made)).mean()

    def taken_for_real(model: nn.Module, code: Tensor) -> Tensor:
        return F.softplus(-judges(model(code))).mean()

    of_critic, of_generator = way.step(critic, told_apart), way.step(generator, taken_for_real)
    for _ in range(3):
        yield of_critic(torch.randn(4, 3, 16, 16), torch.randn(4, 16, 4, 4)), of_generator(torch.randn(4, 16, 4, 4))


@job("WGAN: a gradient penalty on images in between")
def gradient_penalty(way: Way) -> Steps:
    _, critic = adversaries()

    def loss(model: nn.Module, real: Tensor, made: Tensor) -> Tensor:
        between = torch.lerp(real, made, torch.rand(len(real), 1, 1, 1, device=real.device)).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return model(made).mean() - model(real).mean() + 10 * penalty

    batches = [(torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16)) for _ in range(3)]
    return way.train(critic, loss, batches, has_gradients=True)


class Quantized(nn.Module):
    """An autoencoder whose code is the nearest of a book, by a straight-through estimate; the book is an average."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(32, 16), nn.Linear(16, 32)
        self.register_buffer("book", torch.randn(24, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encode(x)
        with torch.no_grad():
            chosen = F.one_hot(torch.cdist(code, self.book).argmin(-1), 24).float()
            nearest = chosen @ self.book
            self.book.lerp_((chosen.T @ code + self.book) / (chosen.sum(0)[:, None] + 1), 0.1)
        return self.decode(code + (nearest - code).detach()), F.mse_loss(code, nearest)


@job("VQ-VAE: a code book that forward moves")
def vq_vae(way: Way) -> Steps:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made, commitment = model(x)
        return F.mse_loss(made, x) + 0.25 * commitment

    return way.train(Quantized(), loss, [torch.randn(64, 32) for _ in range(3)])


@job("normalizing flow: affine couplings and their volumes")
def normalizing_flow(way: Way) -> Steps:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            volume = x.new_zeros(len(x))
            for net in self.nets:
                kept, moved = x.chunk(2, -1)
                scale, shift = net(kept).chunk(2, -1)
                volume = volume + scale.tanh().sum(-1)
                x = torch.cat([moved * scale.tanh().exp() + shift, kept], -1)
            return torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(-1) + volume

    return way.train(Flow(), lambda model, x: -model(x).mean(), [torch.randn(64, 16) for _ in range(3)])


@job("denoising autoencoder whose decoder has the encoder's weights, turned")
def tied_autoencoder(way: Way) -> Steps:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.bias = nn.Linear(64, 32), nn.Linear(32, 16), nn.Parameter(torch.zeros(64))

        def forward(self, x: Tensor) -> Tensor:
            code = self.second(self.first(x).relu()).relu()
            return F.linear(F.linear(code, self.second.weight.T).relu(), self.first.weight.T, self.bias)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return F.smooth_l1_loss(model(x + 0.1 * torch.randn_like(x)), x)

    return way.train(Tied(), loss, [torch.randn(128, 64) for _ in range(3)])
