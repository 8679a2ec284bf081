"""The loops of nanoGPT and nanochat, and of diffusers' script for LoRA, written as there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .loop import Line, Trained, loop
from .models import LENGTH, VOCABULARY, Array, Gpt, LossGpt

STEPS, ACCUMULATES, SIZE = 4, 2, 2


def get_batch(drawn: torch.Generator, data: Array) -> tuple[Tensor, Tensor]:
    """Token ids, and those one further."""
    starts = torch.randint(len(data) - LENGTH, (SIZE,), generator=drawn).tolist()
    x, y = (torch.tensor(np.stack([data[i + by : i + by + LENGTH] for i in starts])) for by in (0, 1))
    return x, y


def tokens() -> tuple[torch.Generator, Array]:
    """What `get_batch` takes."""
    return torch.Generator().manual_seed(0), np.random.default_rng(0).integers(0, VOCABULARY, 1024)


@loop("train.py of nanoGPT: GradScaler, tied head, two groups, evaluates")
def nanogpt(line: Line) -> Trained:
    torch.manual_seed(0)
    raw_model = model = Gpt(tied=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    decays = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    model = line.module(model)
    source = tokens()

    def estimate_loss() -> float:
        model.eval()
        losses = torch.zeros(2)
        with torch.no_grad():
            for k in range(2):
                losses[k] = model(*get_batch(*source))[1].item()
        model.train()
        return losses.mean().item()

    figures = []
    ids, targets = get_batch(*source)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        if step % 2 == 0:
            figures.append(estimate_loss())
        for _ in range(ACCUMULATES):
            _, loss = model(ids, targets)
            loss = loss / ACCUMULATES
            ids, targets = get_batch(*source)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        figures.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        figures.append(loss.item())
    return Trained(figures, [raw_model], [optimizer])


@loop("base_train.py of nanochat: Muon for matrices, AdamW for the rest")
def nanochat(line: Line) -> Trained:
    torch.manual_seed(0)
    orig_model = model = LossGpt(tied=False)
    model = line.module(model)
    matrices = [p for p in orig_model.blocks.parameters() if p.dim() == 2]
    rest = [p for p in orig_model.parameters() if all(p is not m for m in matrices)]
    adamw = torch.optim.AdamW(rest, lr=1e-3, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    muon = torch.optim.Muon(matrices, lr=2e-2, momentum=0.95)
    optimizers = [adamw, muon]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    source = tokens()
    figures = []
    x, y = get_batch(*source)
    for step in range(STEPS):
        for _ in range(ACCUMULATES):
            loss = model(x, y)
            train_loss = loss.detach()
            loss = loss / ACCUMULATES
            loss.backward()
            x, y = get_batch(*source)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (STEPS - step) / STEPS
        for group in muon.param_groups:
            group["momentum"] = 0.85 + 0.02 * step
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        figures.append(train_loss.item())
    return Trained(figures, [orig_model], optimizers)


NEEDS = ("diffusers", "transformers", "accelerate", "peft")


@loop("train_text_to_image_lora.py of diffusers: frozen UNet, LoRA", needs=NEEDS)
def diffusers_lora(line: Line) -> Trained:
    import diffusers
    import peft
    from accelerate import Accelerator
    from diffusers.optimization import get_scheduler

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    vae, text_encoder, unet = pipeline()
    noise_scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)
    for frozen in (unet, vae, text_encoder):
        frozen.requires_grad_(requires_grad=False)
    targets = ["to_k", "to_q", "to_v", "to_out.0"]
    unet.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=targets))
    lora_layers = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(lora_layers, lr=1e-3, weight_decay=1e-2)
    line.forward(unet)
    loader = torch.utils.data.DataLoader(captioned(), batch_size=2)
    lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=STEPS)
    unet, optimizer, loader, lr_scheduler = accelerator.prepare(unet, optimizer, loader, lr_scheduler)
    figures = []
    unet.train()
    for batch in loader:
        with accelerator.accumulate(unet):
            latents = vae.encode(batch["pixel_values"]).latent_dist.sample() * vae.config.scaling_factor
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(latents),)).long()
            noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
            hidden = text_encoder(batch["input_ids"], return_dict=False)[0]
            model_pred = unet(noisy_latents, timesteps, hidden, return_dict=False)[0]
            loss = F.mse_loss(model_pred.float(), noise.float(), reduction="mean")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                figures.append(accelerator.clip_grad_norm_(lora_layers, 1.0).item())
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            figures.append(loss.item())
    return Trained(figures, [unet], [optimizer], others=[vae, text_encoder])


def pipeline() -> tuple[Any, Any, Any]:
    """VAE, text encoder and UNet of a tiny Stable Diffusion."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel

    blocks = (32, 64)
    vae = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 16), norm_num_groups=8, latent_channels=4,
    )  # fmt: skip
    text = CLIPTextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=blocks, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=4,
    )  # fmt: skip
    return vae.eval(), CLIPTextModel(text).eval(), unet


def captioned() -> list[dict[str, Any]]:
    """Images and the tokens of their captions."""
    drawn = np.random.default_rng(0)
    return [
        {
            "pixel_values": drawn.standard_normal((3, 16, 16), dtype=np.float32),
            "input_ids": drawn.integers(3, VOCABULARY, LENGTH),
        }
        for _ in range(4 * STEPS)
    ]
