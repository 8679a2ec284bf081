"""The tiny models of the loops, and their data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

Array = np.ndarray[Any, np.dtype[np.int64]]
VOCABULARY = 512
LENGTH = 16
PAD, END, UNKNOWN = 0, 1, 2
LAYERS = 2


def llama(*, tied: bool = False, layers: int = LAYERS) -> LlamaForCausalLM:
    """A Llama of about 2 MiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PAD, eos_token_id=END, bos_token_id=END,
        tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(count: int = 8) -> list[dict[str, Array]]:
    """Token ids with a mask of padding, and labels; arrays, for no budget counts what a loop keeps of its data.

    Each row is padded: transformers drops a mask that masks nothing, unless it is compiled (docs/exactness.md).
    """
    drawn = np.random.default_rng(0)
    found = []
    for index in range(count):
        ids = drawn.integers(3, VOCABULARY, LENGTH)
        mask = np.ones(LENGTH, dtype=np.int64)
        mask[LENGTH - 1 - index % 4 :] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": np.where(mask == 0, -100, ids)})
    return found


def batches(count: int = 4, size: int = 2) -> Iterator[dict[str, Tensor]]:
    """The rows in batches."""
    found = rows(count * size)
    for begin in range(0, count * size, size):
        part = found[begin : begin + size]
        yield {name: torch.tensor(np.stack([row[name] for row in part])) for name in part[0]}


def sentence(index: int, words: int = 6) -> str:
    """Words that `tokenizer` knows."""
    drawn = torch.Generator().manual_seed(index)
    return " ".join(f"w{number}" for number in torch.randint(0, VOCABULARY - 8, (words,), generator=drawn).tolist())


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are `w` and a number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", "[CLS]", "[SEP]", *(f"w{i}" for i in range(VOCABULARY - 5))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **named)


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.norm(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.other_norm(x))))


class Gpt(nn.Module):
    """A GPT that gives logits and loss, with the head tied to the embedding or not."""

    def __init__(self, *, tied: bool, layers: int = LAYERS, width: int = 96) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers))
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LossGpt(Gpt):
    """A GPT that gives its loss alone."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        return super().forward(ids, targets)[1]
