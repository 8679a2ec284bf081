"""Language models: those of transformers, with masks and without, and recurrent ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .job import job
from .ways import Steps, Way

VOCABULARY = 128
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


def sizes(layers: int = 2) -> dict[str, int]:
    """The sizes of small configurations, of so many layers."""
    return {
        "hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": VOCABULARY,
    }  # fmt: skip


def llama(layers: int = 2, **more: Any) -> nn.Module:
    """A small Llama."""
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes(layers), num_key_value_heads=2, **more))


@job("Llama", needs=HF)
def llama_plain(way: Way) -> Steps:
    return way.train(llama(), own_loss, texts())


@job("Llama, a padding mask", needs=HF, deep=16)
def llama_padded(way: Way, layers: int = 2) -> Steps:
    return way.train(llama(layers), own_loss, texts("padded"))


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


@job("Qwen3, a padding mask", needs=HF, deep=28)
def qwen3(way: Way, layers: int = 2) -> Steps:
    import transformers

    config = transformers.Qwen3Config(**sizes(layers), num_key_value_heads=2, head_dim=16)
    return way.train(transformers.Qwen3ForCausalLM(config), own_loss, texts("padded"))


@job("Qwen3-Next: a gated delta rule, attention and experts, a padding mask", needs=HF)
def qwen3_next(way: Way) -> Steps:
    import transformers

    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    kinds = ["linear_attention", "full_attention"]
    config = transformers.Qwen3NextConfig(
        **sizes(), num_key_value_heads=2, head_dim=16, layer_types=kinds, **heads, **experts
    )
    return way.train(transformers.Qwen3NextForCausalLM(config), own_loss, texts("padded"))


@job("Gemma 3 with sliding windows, a padding mask", needs=HF)
def gemma3(way: Way) -> Steps:
    import transformers

    config = transformers.Gemma3TextConfig(**sizes(), num_key_value_heads=2, head_dim=16, sliding_window=16)
    return way.train(transformers.Gemma3ForCausalLM(config), own_loss, texts("padded"))


@job("GPT-2 with its dropouts, a padding mask", needs=HF, deep=12)
def gpt2(way: Way, layers: int = 2) -> Steps:
    import transformers

    config = transformers.GPT2Config(
        n_embd=64, n_layer=layers, n_head=4, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2
    )
    return way.train(transformers.GPT2LMHeadModel(config), own_loss, texts("padded"))


@job("BERT with its dropouts, a padding mask", needs=HF, deep=12)
def bert(way: Way, layers: int = 2) -> Steps:
    import transformers

    return way.train(transformers.BertForMaskedLM(transformers.BertConfig(**sizes(layers))), own_loss, texts("padded"))


@job("T5, a padding mask", needs=HF)
def t5(way: Way) -> Steps:
    import transformers

    config = transformers.T5Config(
        d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return way.train(transformers.T5ForConditionalGeneration(config), own_loss, texts("padded"))


@job("GPT-2 with tied weights and no dropout, position ids of packed texts", needs=HF)
def gpt2_packed(way: Way) -> Steps:
    import transformers

    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    positions = torch.cat([torch.arange(20), torch.arange(12)]).expand(4, -1)
    batches = [batch | {"position_ids": positions} for batch in texts()]
    return way.train(transformers.GPT2LMHeadModel(config), own_loss, batches)


@job("Mamba", needs=HF)
def mamba(way: Way) -> Steps:
    import transformers

    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, use_mambapy=False,
    )  # fmt: skip
    return way.train(transformers.MambaForCausalLM(config), own_loss, texts(length=12))


@job("Mamba 2", needs=HF)
def mamba2(way: Way) -> Steps:
    import transformers

    config = transformers.Mamba2Config(
        hidden_size=32, num_hidden_layers=2, state_size=8, vocab_size=VOCABULARY, num_heads=4, head_dim=16, n_groups=1,
        chunk_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return way.train(transformers.Mamba2ForCausalLM(config), own_loss, texts(length=16))


class Receptance(nn.Module):
    """A layer after RWKV: a decaying sum over time, one step after the other."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.key, self.value, self.gate = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.decay, self.mix = nn.Parameter(torch.randn(width)), nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        shifted = F.pad(x, (0, 0, 1, -1))
        mixed = x * self.mix + shifted * (1 - self.mix)
        keys, values = self.key(mixed).clamp(max=10).exp(), self.value(mixed)
        above, below = torch.zeros_like(x[:, 0]), torch.full_like(x[:, 0], 1e-6)
        keep, out = torch.exp(-self.decay.exp()), []
        for time in range(x.shape[1]):
            above = above * keep + keys[:, time] * values[:, time]
            below = below * keep + keys[:, time]
            out.append(above / below)
        return x + torch.sigmoid(self.gate(mixed)) * torch.stack(out, 1)


@job("RWKV's recurrence, written as a loop over time")
def rwkv(way: Way) -> Steps:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), Receptance(), Receptance(), nn.Linear(32, VOCABULARY))
    return way.train(model, next_token, [tokens(4, 12) for _ in range(3)])


class StateSpace(nn.Module):
    """A diagonal state space of complex numbers, applied as a convolution by Fourier transforms (S4D)."""

    def __init__(self, width: int = 16, states: int = 8) -> None:
        super().__init__()
        self.log_decay, self.turn = nn.Parameter(torch.rand(width, states)), nn.Parameter(torch.randn(width, states))
        self.mixing, self.out = nn.Parameter(torch.randn(width, states, 2)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        poles = torch.complex(-self.log_decay.exp(), self.turn)
        powers = torch.exp(poles[..., None] * torch.arange(length, device=x.device) * 0.1)
        kernel = torch.einsum("wn,wnl->wl", torch.view_as_complex(self.mixing), powers).real
        spectrum = torch.fft.rfft(x.mT, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
        return x + self.out(F.gelu(torch.fft.irfft(spectrum, n=2 * length)[..., :length].mT))


@job("state space layers by Fourier transforms (S4D)")
def state_space(way: Way) -> Steps:
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), StateSpace(), StateSpace(), nn.Linear(16, VOCABULARY))
    return way.train(model, next_token, [tokens(4, 24) for _ in range(3)])


@job("texts of several lengths as a jagged nested tensor")
def nested(way: Way) -> Steps:
    def loss(model: nn.Module, *rows: Tensor) -> Tensor:
        jagged = torch.nested.nested_tensor(list(rows), layout=torch.jagged)
        return torch.nested.to_padded_tensor(model(jagged), 0.0).square().mean()

    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return way.train(model, loss, [(torch.randn(7, 16), torch.randn(12, 16)) for _ in range(3)])


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


@job("LSTM language model with dropout, a last short batch")
def lstm(way: Way) -> Steps:
    return way.train(Recurrent(), next_token, [tokens(batch, 8) for batch in (8, 8, 8, 3)])


@job("nn.Transformer from sequence to sequence, with its dropout and masks")
def transformer(way: Way) -> Steps:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 32)
            self.both = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
            self.head = nn.Linear(32, VOCABULARY)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            later = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            padded = source == 0
            return self.head(
                self.both(
                    self.embed(source), self.embed(target), tgt_mask=later, src_key_padding_mask=padded,
                    memory_key_padding_mask=padded, tgt_is_causal=True,
                )
            )  # fmt: skip

    def loss(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())

    return way.train(Translator(), loss, [(F.pad(tokens(4, 10), (0, 2)), tokens(4, 9)) for _ in range(3)])


@job("texts of any length in three buckets, read by convolutions")
def buckets(way: Way) -> Steps:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(VOCABULARY, 32, padding_idx=0)
            self.narrow, self.wide = (nn.Conv1d(32, 64, n, padding=n // 2) for n in (3, 5))
            self.head = nn.Linear(128, 2)

        def forward(self, words: Tensor) -> Tensor:
            x = self.words(words).mT
            found = [layer(x).relu().amax(2) for layer in (self.narrow, self.wide)]
            return self.head(F.dropout(torch.cat(found, 1), 0.5, self.training))

    batches = []
    for longest in (30, 10, 18, 32, 15):
        length = next(n for n in (12, 20, 32) if n >= longest)
        batches.append((F.pad(tokens(16, longest), (0, length - longest)), torch.randint(0, 2, (16,))))
    return way.train(Classifier(), lambda model, words, labels: F.cross_entropy(model(words), labels), batches)
