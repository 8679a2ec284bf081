"""BERT-base for masked language modelling (Devlin et al., arXiv:1810.04805).

It is built as transformers defines it, from a configuration with random weights; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import RequestError
from overspill.core.text import pip_install

from .built_model import IGNORED, BuiltModel, checked_size

_POSITIONS = 512
_MASK_TOKEN = 103  # [MASK] in the vocabulary of bert-base-uncased
_MASKED_SHARE = 0.15  # §3.1, Task #1
_SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}


def masked_loss(module: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the masked tokens."""
    return module(input_ids=input_ids, labels=labels).loss


def _batches(vocabulary: int, seq_len: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (batch_size, seq_len), device="cpu")
        masked = torch.rand(batch_size, seq_len, device="cpu") < _MASKED_SHARE
        masked[:, 0] = True  # a batch with nothing masked has no loss
        return text.masked_fill(masked, _MASK_TOKEN), text.masked_fill(~masked, IGNORED)

    return make_batch


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return BERT-base on 128 tokens, or a small one.

    It has 12 layers of 768; the small one has 2 layers of 64 on 32 tokens. Raises RequestError without transformers.
    """
    seq_len = checked_size(name, "seq_len", size, default=32 if small else 128, maximum=_POSITIONS)
    try:
        from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415  # an optional extra
    except ImportError as error:
        raise RequestError(f"{name} needs the transformers package: {pip_install('bert')}") from error
    options: dict[str, Any] = {"attn_implementation": "sdpa"} | (_SMALL if small else {})
    config = BertConfig(**options)
    module = BertForMaskedLM(config)
    module.train()
    return BuiltModel(name, module, _batches(config.vocab_size, seq_len), masked_loss)
