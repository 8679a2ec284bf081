"""Translation by LSTMs with attention (Luong et al., arXiv:1508.04025).

It is global attention of form "general" (§3.1). Decoding feeds the attentional vector on to the next step (§3.3) and
reads the right words (teacher forcing). All sentences have the same length, so nothing is masked. In the varied job
lengths are as in running text, and each batch is padded to its longest sentences. Padding is neither attended to nor
part of the loss.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.models.built_model import BuiltModel, checked_size
from overspill.models.gpt2 import next_token_batches
from overspill.models.lstm import LstmStack, uniform_init
from overspill.pytorch.fake_tensors import FakeTensor

_DROPOUT = 0.2  # §4.1
_INITIAL = 0.1  # §4.1: parameters are uniform in [-0.1, 0.1]
_PADDING = 0  # the word that stands behind the end of a sentence
_IGNORED = -100  # as a word to predict: torch's own number for what is no part of the loss
_MEAN_SHARE, _DEVIATION_SHARE = 0.5, 0.28
"""Lengths are log-normal, as those of sentences are (Williams, Biometrika 31, 1940). Their mean and deviation as shares
of the longest length are an assumption: 25 and 14 words of 50, where §4.1 cuts."""
_TARGET_DEVIATION = 0.15
"""The deviation of a translation's length from its source's, as a share of that length: an assumption too."""


@dataclass(frozen=True)
class _Seq2SeqShape:
    vocabulary: int
    width: int
    layers: int


_FULL = _Seq2SeqShape(vocabulary=50_000, width=1000, layers=4)  # §4.1
_SMALL = _Seq2SeqShape(vocabulary=61, width=16, layers=2)


class Translator(nn.Module):
    """An LSTM encoder and a decoder with attention.

    The decoder attends to the encoder's top layer's states, and returns logits of the target's words.
    """

    def __init__(self, shape: _Seq2SeqShape, *, masked: bool = False) -> None:
        super().__init__()
        self.masked = masked
        width = shape.width
        self.source = nn.Embedding(shape.vocabulary, width)
        self.target = nn.Embedding(shape.vocabulary, width)
        self.encoder = LstmStack(width, width, shape.layers, _DROPOUT)
        self.decoder = LstmStack(2 * width, width, shape.layers, _DROPOUT)
        self.score = nn.Linear(width, width, bias=False)  # W_a, equation 8
        self.attend = nn.Linear(2 * width, width, bias=False)  # W_c, equation 5
        self.dropout = nn.Dropout(_DROPOUT)
        self.head = nn.Linear(width, shape.vocabulary, bias=False)  # W_s, equation 6

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits `[batch, target words, vocabulary]` of the word after each of `target`."""
        # Encode, one word at a time.
        embedded = self.source(source)
        states = self.encoder.start(embedded[:, 0])
        tops = []
        for word in embedded.unbind(1):
            states = self.encoder(word, states)
            tops.append(states[-1][0])
        memory = torch.stack(tops, 1)
        # Attend to the encoder's states, those of padding left out.
        padding = (source == _PADDING).unsqueeze(2) if self.masked else None
        keys = self.score(memory)
        attentional = torch.zeros_like(memory[:, 0])
        # Decode, feeding the attentional vector on.
        outputs = []
        for word in self.target(target).unbind(1):
            states = self.decoder(torch.cat([word, attentional], 1), states)
            attentional = self._attentional(states[-1][0], keys, memory, padding)
            outputs.append(attentional)
        return self.head(self.dropout(torch.stack(outputs, 1)))

    def _attentional(self, query: Tensor, keys: Tensor, memory: Tensor, padding: Tensor | None) -> Tensor:
        """Return the attentional vector tanh(W_c [context; query]).

        The context is the memory, weighted by how its keys match the query.
        """
        scores = keys @ query.unsqueeze(2)
        weights = (scores if padding is None else scores.masked_fill(padding, float("-inf"))).softmax(1)
        context = (weights.transpose(1, 2) @ memory).squeeze(1)
        return torch.tanh(self.attend(torch.cat([context, query], 1)))


def translation_loss(module: nn.Module, source: Tensor, target: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross entropy of each target word's successor. Padding has none."""
    return F.cross_entropy(module(source, target).flatten(0, 1), following.flatten(), ignore_index=_IGNORED)


def _batches(vocabulary: int, seq_len: int) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
    draw = next_token_batches(vocabulary, seq_len)

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randint(vocabulary, (batch_size, seq_len), device="cpu"), *draw(batch_size)

    return make_batch


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return the translator on 50 words, or a small one.

    It has four layers of 1000; the small one two layers of 16 over 3 words.
    """
    seq_len = checked_size(name, "seq_len", size, default=3 if small else 50)
    shape = _SMALL if small else _FULL
    module = Translator(shape)
    uniform_init(module, _INITIAL)
    return BuiltModel(name, module, _batches(shape.vocabulary, seq_len), translation_loss)


def build_varied(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return the translator on sentences of varied lengths: at most `size` words, or 8 in the small one."""
    longest = checked_size(name, "seq_len", size, default=8 if small else 50)
    shape = _SMALL if small else _FULL
    module = Translator(shape, masked=True)
    uniform_init(module, _INITIAL)
    return BuiltModel(name, module, _varied_batches(shape.vocabulary, longest), translation_loss, varied=True)


def _varied_batches(vocabulary: int, longest: int) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
    """Return a `make_batch` whose batches are as long as their longest sentences."""
    # Parameters of the log-normal distribution of lengths.
    mean, deviation = _MEAN_SHARE * longest, _DEVIATION_SHARE * longest
    sigma = math.sqrt(math.log1p((deviation / mean) ** 2))
    mu = math.log(mean) - sigma**2 / 2

    def length(words: float) -> int:
        return min(max(round(words), 1), longest)

    def sentences(lengths: list[int], padding: int) -> Tensor:
        drawn = torch.randint(1, vocabulary, (len(lengths), max(lengths)), device="cpu")
        behind = torch.arange(max(lengths), device="cpu") >= torch.tensor(lengths, device="cpu").unsqueeze(1)
        return drawn.masked_fill(behind, padding)

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = random.Random(_seed())  # noqa: S311 - lengths are no secret
        sources = [length(draw.lognormvariate(mu, sigma)) for _ in range(batch_size)]
        targets = [length(words * draw.gauss(1, _TARGET_DEVIATION)) for words in sources]
        return sentences(sources, _PADDING), sentences(targets, _PADDING), sentences(targets, _IGNORED)

    return make_batch


def _seed() -> int:
    """Return a random number from torch's generator.

    Where tensors are fake and have no numbers, it is the generator's seed.
    """
    drawn = torch.randint(2**62, (), device="cpu")
    return torch.initial_seed() if isinstance(drawn, FakeTensor) else int(drawn)
