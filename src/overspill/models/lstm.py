"""Word language model of LSTM cells (Zaremba et al., arXiv:1409.2329).

It is the medium regularised network of §4.1. The steps are unrolled over nn.LSTMCell, as in the paper's own program.
Each batch starts from a state of zeros; the paper carries the last one over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .built_model import BuiltModel, checked_size
from .gpt2 import next_token_batches, next_token_loss

_DROPOUT = 0.5
_INITIAL = 0.05  # weights are uniform in [-0.05, 0.05]

State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _LstmShape:
    vocabulary: int
    width: int
    layers: int


_FULL = _LstmShape(vocabulary=10_000, width=650, layers=2)
_SMALL = _LstmShape(vocabulary=97, width=16, layers=2)


class LstmStack(nn.Module):
    """One step of a stack of LSTM layers.

    Dropout applies to a layer's input from below, never to its own state (§3.2).
    """

    def __init__(self, inputs: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.width = width
        self.cells = nn.ModuleList(nn.LSTMCell(width if layer > 0 else inputs, width) for layer in range(layers))
        self.dropout = nn.Dropout(dropout)

    def start(self, like: Tensor) -> list[State]:
        """Return each layer's first state: zeros, for as many sequences as `like` has, of its dtype and device."""
        zeros = like.new_zeros(like.shape[0], self.width)
        return [(zeros, zeros) for _ in self.cells]

    def forward(self, x: Tensor, states: Sequence[State]) -> list[State]:
        """Return each layer's next state.

        The output of the stack is the last one's first tensor.
        """
        following = []
        for cell, state in zip(self.cells, states, strict=True):
            following.append(cell(self.dropout(x), state))
            x = following[-1][0]
        return following


class LanguageModel(nn.Module):
    """Embedding, LSTM layers, and logits of the next word."""

    def __init__(self, shape: _LstmShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = LstmStack(shape.width, shape.width, shape.layers, _DROPOUT)
        self.dropout = nn.Dropout(_DROPOUT)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits, `[batch, steps, vocabulary]`."""
        x = self.words(words)
        states = self.layers.start(x[:, 0])
        outputs = []
        for step in x.unbind(1):
            states = self.layers(step, states)
            outputs.append(states[-1][0])
        return self.head(self.dropout(torch.stack(outputs, 1)))


def uniform_init(module: nn.Module, bound: float) -> None:
    """Initialise every parameter uniformly in [-bound, bound], as the LSTM papers do."""
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -bound, bound)


def build(name: str, *, small: bool, size: int | None) -> BuiltModel:
    """Return the LSTM language model on 35 words, or a small one.

    It has two layers of 650; the small one has two layers of 16 over 4 words.
    """
    seq_len = checked_size(name, "seq_len", size, default=4 if small else 35)
    shape = _SMALL if small else _FULL
    module = LanguageModel(shape)
    uniform_init(module, _INITIAL)
    return BuiltModel(name, module, next_token_batches(shape.vocabulary, seq_len), next_token_loss)
