"""Models of published figures that no name of `overspill models` gives: each returns a module and what makes its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_TOKENS = 512


def bert_large() -> tuple[nn.Module, Callable[[int], dict[str, Tensor]]]:
    """bert-large-uncased with a classifier of two labels, on 512 tokens."""
    import transformers  # noqa: PLC0415 - an optional package

    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=2
    )
    module = transformers.BertForSequenceClassification(config)

    def make_batch(size: int) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(30000, (size, _TOKENS)), "labels": torch.randint(2, (size,))}

    return module, make_batch


def t5_3b() -> tuple[nn.Module, Callable[[int], dict[str, Tensor]]]:
    """t5-3b, on eight tokens."""
    import transformers  # noqa: PLC0415

    config: Any = transformers.T5Config(
        d_model=1024,
        d_ff=16384,
        d_kv=128,
        num_heads=32,
        num_layers=24,
        num_decoder_layers=24,
        vocab_size=32128,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    module = transformers.T5ForConditionalGeneration(config)

    def make_batch(size: int) -> dict[str, Tensor]:
        tokens = torch.randint(32000, (size, 8))
        return {"input_ids": tokens, "labels": tokens}

    return module, make_batch
