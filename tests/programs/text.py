"""Models that read sequences."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.programs.harness import Made, Memory, program
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WORDS = 256


def texts(count: int, size: int, length: int):
    """Batches of word numbers, and those that come next."""
    for _ in range(count):
        words = torch.randint(0, WORDS, (size, length + 1))
        yield words[:, :-1].contiguous(), words[:, 1:].contiguous()


class LstmModel(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.drop = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, 2, dropout=0.2)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, state = self.lstm(self.drop(self.words(words)), state)
        return F.log_softmax(self.head(self.drop(out)), dim=-1), state


@program("LSTM language model: carried state, clipped gradients, plain SGD by hand")
def lstm_language_model(memory: Memory) -> Made:
    model = LstmModel()
    state = (torch.zeros(2, 32, 96), torch.zeros(2, 32, 96))
    model = memory.compile(model)
    for words, following in texts(3, 48, 32):
        model.zero_grad()
        state = tuple(s.detach() for s in state)
        found, state = model(words, state)
        loss = F.nll_loss(found.view(-1, WORDS), following.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-2.0)
        yield loss, *state, model


class Block(nn.Module):
    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        return self.out((F.dropout(scores.softmax(dim=-1), 0.1, self.training) @ v).transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """A decoder after nanoGPT: written-out attention, the head's weight is the embedding's, its own loss."""

    def __init__(self, width: int = 64, depth: int = 3, longest: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, 4, longest) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.words.weight = self.head.weight

    def forward(self, words: Tensor, following: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if following is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, WORDS), following.view(-1), ignore_index=-1)


def parts_with_decay(model: nn.Module) -> list[dict[str, object]]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def own_loss(model: nn.Module, words: Tensor, following: Tensor) -> Tensor:
    return model(words, following)[1]


@program("Transformer language model after nanoGPT: tied weights, decay groups", "compile", "train_step")
def gpt(memory: Memory) -> Made:
    model = Gpt()
    optimizer = torch.optim.AdamW(parts_with_decay(model), lr=6e-4, betas=(0.9, 0.95))
    step = memory.step(model, own_loss, optimizer)
    for words, following in texts(3, 8, 64):
        yield step(words, following)
    yield model


@program("the same with gradients accumulated over four micro-batches and clipped")
def accumulation(memory: Memory) -> Made:
    model = Gpt(depth=2)
    optimizer = torch.optim.AdamW(parts_with_decay(model), lr=6e-4)
    model = memory.compile(model)
    for _ in range(2):
        for words, following in texts(4, 8, 64):
            _, loss = model(words, following)
            loss = loss / 4
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss, model


class EncoderModel(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(words), device=words.device)
        return self.head(self.encoder(self.words(words) * 8.0, mask=mask, is_causal=True))


def next_words(model: nn.Module, words: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), following.flatten())


@program("nn.TransformerEncoder with a causal mask", "compile", "train_step")
def transformer_encoder(memory: Memory) -> Made:
    model = EncoderModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = memory.step(model, next_words, optimizer)
    for words, following in texts(3, 32, 24):
        yield step(words, following)
    yield model


class Seq2Seq(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(WORDS, width), nn.Embedding(WORDS, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.between, self.values = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.head = nn.Linear(2 * width, WORDS)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.source(source), lengths, batch_first=True, enforce_sorted=False)
        packed, last = self.encoder(packed)
        memory, _ = pad_packed_sequence(packed, batch_first=True, total_length=source.shape[1])
        values = self.values(memory)
        start = torch.tanh(self.between(torch.cat([last[0], last[1]], dim=1)))
        out, _ = self.decoder(self.target(target), start[None])
        weights = (out @ values.transpose(1, 2)).softmax(dim=-1)
        return self.head(torch.cat([out, weights @ values], dim=-1))


@program("sequence to sequence with packed sequences and attention")
def seq2seq(memory: Memory) -> Made:
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model = memory.compile(model)
    for _ in range(3):
        lengths = torch.randint(20, 40, (24,))
        lengths[0] = 40
        source, target = torch.randint(0, WORDS, (24, 40)), torch.randint(0, WORDS, (24, 30))
        found = model(source, lengths, target[:, :-1])
        loss = F.cross_entropy(found.reshape(-1, WORDS), target[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss, model


class GruRegression(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(1, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0])


def waves(count: int, length: int) -> Tensor:
    return torch.sin(torch.arange(length + 1.0)[None, :, None] / 20 + torch.rand(count, 1, 1) * 6)


@program("GRU regression on sine waves, LBFGS with a closure")
def gru_lbfgs(memory: Memory) -> Made:
    model = GruRegression(64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8, max_iter=4, history_size=3)
    criterion = nn.MSELoss()
    data = waves(64, 20)
    model = memory.compile(model)
    for _ in range(2):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = criterion(model(data[:, :-1]), data[:, 1:])
            loss.backward()
            return loss

        yield optimizer.step(closure), model


def next_values(model: nn.Module, data: Tensor) -> Tensor:
    return F.mse_loss(model(data[:, :-1]), data[:, 1:])


@program("GRU of 40 units, a width that is no multiple of a vector register's", "compile", "train_step")
def gru_narrow(memory: Memory) -> Made:
    model = GruRegression(40)
    step = memory.step(model, next_values, torch.optim.Adam(model.parameters(), lr=1e-2))
    for _ in range(3):
        yield step(waves(128, 12))
    yield model


class Classifier(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width, padding_idx=0)
        self.narrow, self.wide = (nn.Conv1d(width, 2 * width, n, padding=n // 2) for n in (3, 5))
        self.head = nn.Linear(4 * width, 2)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words).transpose(1, 2)
        found = [torch.relu(layer(x)).amax(dim=2) for layer in (self.narrow, self.wide)]
        return self.head(F.dropout(torch.cat(found, dim=1), 0.5, self.training))


def bucketed(model: nn.Module, words: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(words), labels)


@program("text of any length in three buckets", "compile", "train_step")
def buckets(memory: Memory) -> Made:
    model = Classifier()
    step = memory.step(model, bucketed, torch.optim.Adam(model.parameters(), lr=1e-3))
    for longest in (60, 20, 37, 64, 30):
        length = next(n for n in (24, 40, 64) if n >= longest)
        words = torch.zeros(32, length, dtype=torch.long)
        words[:, :longest] = torch.randint(1, WORDS, (32, longest))
        yield step(words, torch.randint(0, 2, (32,)))
    yield model


class LayerDrop(nn.Module):
    """Drops whole layers by a look at a random number in Python."""

    def __init__(self, width: int = 128, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand(1) < 0.3:
                continue
            x = x + layer(x)
        return self.head(x)


@program("layer drop: `if torch.rand(1) < p` in Python")
def layer_drop(memory: Memory) -> Made:
    model = LayerDrop()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model = memory.compile(model)
    for _ in range(3):
        loss = F.cross_entropy(model(torch.randn(512, 128)), torch.randint(0, 10, (512,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model
