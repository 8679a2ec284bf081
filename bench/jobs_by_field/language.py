"""Language models: those of transformers, with masks and without, and recurrent ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .job import job
from .ways import Steps, Way

VOCABULARY = 128
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": VOCABULARY,
}  # fmt: skip
HF = ("transformers",)


def tokens(*shape: int) -> Tensor:
    """Token ids, none of which is a special one of small configurations."""
    return torch.randint(5, VOCABULARY, shape)


def texts(mask: str = "none", steps: int = 3, batch: int = 4, length: int = 32) -> list[dict[str, Tensor]]:
    """Batches of a language model: without a mask, with a `full` one, or `padded`."""
    batches = []
    for _ in range(steps):
        ids = tokens(batch, length)
        made = {"input_ids": ids, "labels": ids}
        if mask != "none":
            made["attention_mask"] = torch.ones_like(ids)
        if mask == "padded":
            made["attention_mask"][0, length - 12 :] = 0
            made["labels"] = ids.masked_fill(made["attention_mask"] == 0, -100)
        batches.append(made)
    return batches


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a model of transformers returns where it is given labels."""
    return model(**batch).loss


def llama(**more: Any) -> nn.Module:
    """A small Llama."""
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **more))


@job("Llama", needs=HF)
def llama_plain(way: Way) -> Steps:
    return way.train(llama(), own_loss, texts())


@job("Llama, a padding mask", needs=HF)
def llama_padded(way: Way) -> Steps:
    return way.train(llama(), own_loss, texts("padded"))


@job("Llama, a mask of ones", needs=HF)
def llama_full_mask(way: Way) -> Steps:
    return way.train(llama(), own_loss, texts("full"))


@job("Llama, masks of ones and padding masks in turn, and a last short batch", needs=HF)
def llama_masks_in_turn(way: Way) -> Steps:
    batches = [texts("full", 1)[0], texts("padded", 1)[0], texts("full", 1)[0], texts("padded", 1, batch=2)[0]]
    return way.train(llama(), own_loss, batches)


@job("Llama, eager attention", needs=HF)
def llama_eager_attention(way: Way) -> Steps:
    return way.train(llama(attn_implementation="eager"), own_loss, texts("padded"))


@job("Qwen3, a padding mask", needs=HF)
def qwen3(way: Way) -> Steps:
    import transformers

    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
    return way.train(transformers.Qwen3ForCausalLM(config), own_loss, texts("padded"))


@job("Gemma 3 with sliding windows, a padding mask", needs=HF)
def gemma3(way: Way) -> Steps:
    import transformers

    config = transformers.Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=16, sliding_window=16)
    return way.train(transformers.Gemma3ForCausalLM(config), own_loss, texts("padded"))


@job("GPT-2 with its dropouts, a padding mask", needs=HF)
def gpt2(way: Way) -> Steps:
    import transformers

    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2
    )
    return way.train(transformers.GPT2LMHeadModel(config), own_loss, texts("padded"))


@job("BERT with its dropouts, a padding mask", needs=HF)
def bert(way: Way) -> Steps:
    import transformers

    return way.train(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)), own_loss, texts("padded"))


@job("T5, a padding mask", needs=HF)
def t5(way: Way) -> Steps:
    import transformers

    config = transformers.T5Config(
        d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return way.train(transformers.T5ForConditionalGeneration(config), own_loss, texts("padded"))


class Recurrent(nn.Module):
    """An LSTM of two layers with dropout between them, over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 64, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of a model that returns logits."""
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@job("LSTM language model with dropout")
def lstm(way: Way) -> Steps:
    return way.train(Recurrent(), next_token, [tokens(8, 20) for _ in range(3)])
