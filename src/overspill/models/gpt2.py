"""GPT-2, a decoder of 124 M parameters (Radford et al., 2019).

"Language models are unsupervised multitask learners", §2.3, Table 2. Figures that the report leaves out (GELU by tanh,
initial weights) are those of github.com/openai/gpt-2 `src/model.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.core.errors import RequestError

from .built_model import BuiltModel, checked_size

_POSITIONS = 1024
_SEQ_LEN = 512
_DROPOUT = 0.1


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder: `depth` layers of `width` channels.

    The defaults are GPT-2's of 124 M parameters.
    """

    width: int = 768
    depth: int = 12
    heads: int = 12
    vocabulary: int = 50257
    positions: int = _POSITIONS

    def __post_init__(self) -> None:
        """Raise RequestError for sizes that no decoder can have."""
        for name, value in asdict(self).items():
            if value < 1:
                raise RequestError(f"{name} {value} is not a size; give 1 or more")
        if self.width % self.heads:
            raise RequestError(
                f"width {self.width} is no multiple of {self.heads} heads; choose another number of heads"
            )


_FULL = Shape()
_SMALL = Shape(width=64, depth=2, heads=4, vocabulary=211)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return each position's mix of earlier positions, `[batch, positions, width]`."""
        batch, positions, _ = x.shape
        heads_of = (batch, positions, -1, self.head_width)
        query, key, value = (part.view(heads_of).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        dropout = _DROPOUT if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, positions, -1))


class TransformerBlock(nn.Module):
    """A transformer block: attention and an MLP four times as wide.

    Each reads a normalised copy of the residual stream.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Gpt2(nn.Module):
    """The decoder, whose output head shares the token embedding's weight."""

    # How layers are cut among GPUs, in the words of transformers.
    _tp_plan: ClassVar[dict[str, str]] = {
        "blocks.*.attention.qkv": "colwise", "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise",
    }  # fmt: skip

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)
        self.dropout = nn.Dropout(_DROPOUT)
        self.blocks = nn.Sequential(*(TransformerBlock(shape) for _ in range(shape.depth)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        _init(self, shape.depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, `[batch, positions, vocabulary]`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        return self.head(self.norm(self.blocks(x)))


def _init(model: nn.Module, depth: int) -> None:
    """Initialise the weights, normal as in the release.

    The deviation is 0.02, and 0.01 for positions. Weights that add to the residual stream are scaled by
    1/sqrt(additions).
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif name.endswith(("attention.out.weight", "mlp.2.weight")):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth))
        elif "norm" not in name:
            nn.init.normal_(parameter, std=0.01 if name == "positions.weight" else 0.02)


def next_token_loss(module: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of each position's next token."""
    return F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())


def next_token_batches(vocabulary: int, seq_len: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a `make_batch` of random tokens and the token after each, both `[batch, seq_len]`."""

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (batch_size, seq_len + 1), device="cpu")
        # two storages of their own: as views of one, the inputs of a captured graph would alias
        return text[:, :-1].clone(), text[:, 1:].clone()

    return make_batch


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return GPT-2 on 512 tokens, or a small one.

    It has 12 layers of 768; the small one has 2 layers of 64 on 32 tokens.
    """
    seq_len = checked_size(name, "seq_len", size, default=32 if small else _SEQ_LEN, maximum=_POSITIONS)
    shape = _SMALL if small else _FULL
    return BuiltModel(name, Gpt2(shape), next_token_batches(shape.vocabulary, seq_len), next_token_loss)


def build_decoder(name: str, sizes: Mapping[str, int], seq_len: int | None) -> BuiltModel:
    """Return a decoder of these sizes on `seq_len` tokens, 512 by default.

    Sizes are fields of `Shape`. Raises RequestError for sizes that no decoder can have.
    """
    length = checked_size(name, "seq_len", seq_len, default=_SEQ_LEN)
    shape = Shape(**{"positions": max(_POSITIONS, length), **sizes})
    return BuiltModel(name, Gpt2(shape), next_token_batches(shape.vocabulary, length), next_token_loss)
