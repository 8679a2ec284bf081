"""Small modules of many kinds, each a job of its own, to see which kernels they run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.models import BuiltModel

IMAGES = (3, 8, 12, 12)
VOLUMES = (2, 4, 6, 6, 6)
ROWS = (4, 16, 32)


class Around(nn.Module):
    """`inner` behind a layer whose gradient makes it part of backward."""

    def __init__(self, inner: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape[1:]))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Half(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.bfloat16()).float()


IMAGE_MODULES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "convolution": lambda: nn.Conv2d(8, 8, 3, padding=1),
    "grouped convolution": lambda: nn.Conv2d(8, 8, 3, groups=4),
    "transposed convolution": lambda: nn.ConvTranspose2d(8, 8, 2, stride=2),
    "batch norm": lambda: nn.BatchNorm2d(8),
    "batch norm in bf16": lambda: Half(nn.BatchNorm2d(8)),
    "batch norm in evaluation": lambda: nn.BatchNorm2d(8).eval(),
    "batch norm without statistics": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "local response norm": lambda: nn.LocalResponseNorm(3),
    "max pooling": lambda: nn.MaxPool2d(2),
    "average pooling": lambda: nn.AvgPool2d(2),
    "adaptive average pooling": lambda: nn.AdaptiveAvgPool2d(5),
    "adaptive max pooling": lambda: nn.AdaptiveMaxPool2d(5),
    "nearest upsampling": lambda: nn.Upsample(scale_factor=2),
    "bilinear upsampling": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "bicubic upsampling": lambda: nn.Upsample(scale_factor=2, mode="bicubic"),
    "pixel shuffle": lambda: nn.PixelShuffle(2),
    "reflection padding": lambda: nn.ReflectionPad2d(1),
    "dropout of channels": lambda: nn.Dropout2d(0.1),
}
ROW_MODULES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "linear": lambda: nn.Linear(32, 32),
    "layer norm": lambda: nn.LayerNorm(32),
    "rms norm": lambda: nn.RMSNorm(32),
    "attention": Attention,
    "causal attention": lambda: (
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
    ),
    "causal attention in bf16": lambda: Half(
        lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)
    ),
    "dropout": lambda: nn.Dropout(0.1),
    "dropout in bf16": lambda: Half(nn.Dropout(0.1)),
    "softmax": lambda: nn.Softmax(-1),
    "log softmax": lambda: nn.LogSoftmax(-1),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
    "hardshrink": nn.Hardshrink,
    "softshrink": nn.Softshrink,
    "softplus": nn.Softplus,
    "leaky relu": nn.LeakyReLU,
    "prelu": nn.PReLU,
    "glu": nn.GLU,
    "embedding": lambda: lambda x: F.embedding(x.detach().abs().long() % 4, x[0]),
    "cumulative sum": lambda: lambda x: x.cumsum(-1),
    "sorting": lambda: lambda x: x.sort(-1).values,
    "gathering": lambda: lambda x: x.gather(-1, x.detach().argsort(-1)),
    "indexing": lambda: lambda x: x[:, [0, 0, 3]],
    "einsum": lambda: lambda x: torch.einsum("bij,bkj->bik", x, x),
    "convolution of rows": lambda: nn.Conv1d(16, 8, 3),
}
VOLUME_MODULES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "convolution of volumes": lambda: nn.Conv3d(4, 4, 3),
    "trilinear upsampling": lambda: nn.Upsample(scale_factor=2, mode="trilinear"),
    "max pooling of volumes": lambda: nn.MaxPool3d(2),
}
CLASSES = 32
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross entropy": lambda x: F.cross_entropy(x[:, 0], _classes(x)),
    "multi margin": lambda x: F.multi_margin_loss(x[:, 0], _classes(x)),
    "multi-label margin": lambda x: F.multilabel_margin_loss(x[:, 0], torch.zeros_like(x[:, 0], dtype=torch.long)),
    "binary cross entropy with logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "huber": lambda x: F.huber_loss(x, torch.ones_like(x)),
    "smooth l1": lambda x: F.smooth_l1_loss(x, torch.ones_like(x)),
    "l1": lambda x: F.l1_loss(x, torch.ones_like(x)),
    "kl divergence": lambda x: F.kl_div(x.log_softmax(-1), torch.ones_like(x)),
    "cosine embedding": lambda x: F.cosine_embedding_loss(x[:, 0], x[:, 1], torch.ones_like(x[:, 0, 0])),
}


def _classes(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[0], dtype=torch.long, device=x.device)


def _mean(output: Tensor) -> Tensor:
    return output.square().mean()


def _builder(
    name: str, make: Callable[[], Callable[[Tensor], Tensor]], shape: tuple[int, ...], loss: Callable[[Tensor], Tensor]
) -> Callable[[], BuiltModel]:
    def build() -> BuiltModel:
        module = Around(make(), shape)
        return BuiltModel(
            name, module, lambda batch: (torch.randn(batch, *shape[1:]),), lambda model, x: loss(model(x))
        )

    return build


MODULES: dict[str, Callable[[], BuiltModel]] = {
    **{name: _builder(name, make, IMAGES, _mean) for name, make in IMAGE_MODULES.items()},
    **{name: _builder(name, make, ROWS, _mean) for name, make in ROW_MODULES.items()},
    **{name: _builder(name, make, VOLUMES, _mean) for name, make in VOLUME_MODULES.items()},
    **{name: _builder(name, lambda: nn.Linear(32, CLASSES), ROWS, loss) for name, loss in LOSSES.items()},
}
