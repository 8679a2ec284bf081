"""What a budget costs where steps are short: a small GPT, ViT and ConvNeXt, each step a tenth of a second or less.

    python bench/small_steps.py [--models nanogpt,vit_tiny,convnext_atto] [--pairs 20] [--out bench/results/small_steps.json]

Paired ratios of step times, budgeted over plain (`paired.py`), at a budget above the peak, where only our own overhead
counts, and at 80 % of what can be saved: peak - 0.8 (peak - floor). Takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cpu_budget import floor_and_peak
from paired import Case, compare, json_record
from torch import Tensor, nn

from overspill.core.units import format_bytes
from overspill.runtime.options import Options

SAVED = 0.8
"""The share of what can be saved that the tight budget saves."""


class Block(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, length, width), as `x`."""
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (p.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A character model of nanoGPT's sizes for a CPU; its embedding and its head are one tensor."""

    def __init__(self, tokens: int = 65, width: int = 128, heads: int = 4, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.token.weight = self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (batch, length, tokens)."""
        at = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.token(ids) + self.position(at))))


class ViT(nn.Module):
    """ViT-tiny: patches of 16 pixels, width 192, 12 blocks."""

    def __init__(self, width: int = 192, heads: int = 3, layers: int = 12, patches: int = 196) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, patches + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, 1000)."""
        patches = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(patches), -1, -1), patches], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, channels, height, width), as `x`."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, and a scaled MLP over channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, channels, height, width), as `x`."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.down(F.gelu(self.up(y))) * self.scale).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """ConvNeXt-atto."""

    def __init__(self, depths: tuple[int, ...] = (2, 2, 6, 2), widths: tuple[int, ...] = (40, 80, 160, 320)) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if stage:
                layers += [ChannelNorm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.body = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, 1000)."""
        return self.head(self.norm(self.body(images).mean((2, 3))))


def _text(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(65, (batch, 64)), torch.randint(65, (batch, 64))


def _images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))


def _loss(logits: Tensor, _inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def nanogpt() -> tuple[nn.Module, Callable[..., Any], Callable[..., Any]]:
    """The small GPT on 64 characters."""
    return GPT(), _text, _loss


def vit_tiny() -> tuple[nn.Module, Callable[..., Any], Callable[..., Any]]:
    """ViT-tiny on images of 224 pixels."""
    return ViT(), _images, _loss


def convnext_atto() -> tuple[nn.Module, Callable[..., Any], Callable[..., Any]]:
    """ConvNeXt-atto on images of 224 pixels."""
    return ConvNeXt(), _images, _loss


CASES = {
    name: Case(f"small_steps:{name}", batch) for name, batch in (("nanogpt", 12), ("vit_tiny", 2), ("convnext_atto", 2))
}


def main() -> None:
    """Run the cases and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--stores", default="host,disk")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "small_steps.json")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    rows: list[dict[str, Any]] = []
    for name in arguments.models.split(","):
        case = CASES[name]
        floor, peak = floor_and_peak(case)
        for label, budget in (
            ("above the peak", 2 * peak),
            (f"{SAVED:.0%} saved", round(peak - SAVED * (peak - floor))),
        ):
            for store in arguments.stores.split(",") if budget < peak else ["host"]:  # nothing is stored above the peak
                found = compare(case, Options(budget=budget, store=store), device, arguments.pairs, warmup=3).summary()
                rows.append({"model": name, "batch": case.batch, "budget": label, "store": store, **found})
                print(describe(rows[-1]), flush=True)
                arguments.out.write_text(json_record(device, rows=rows))


def describe(row: dict[str, Any]) -> str:
    """One case as one line."""
    return (
        f"{row['model']:13s} {row['budget']:14s} {row['store']:4s} "
        f"plan {format_bytes(row['planned_peak_bytes'])} of {format_bytes(row['unmanaged_peak_bytes'])}: "
        f"plain {statistics.median(row['plain_step_seconds']) * 1000:.0f} ms, measured ratio {row['measured_ratio_median']:.2f} "
        f"({row['measured_ratio_min']:.2f} to {row['measured_ratio_max']:.2f}), identical {row['losses_identical']}"
    )


if __name__ == "__main__":
    main()
