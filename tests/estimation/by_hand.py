"""Small jobs recorded, and their bytes by kind, which can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from overspill import models
from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.record import record
from overspill.core import Phase, TensorKind
from overspill.estimation.programs import program_of
from overspill.job import GivenModel, Job

WIDTH, DEPTH, BATCH = 256, 4, 64
FEATURES = 4 * BATCH * WIDTH
LAYERS = 2 * DEPTH
WEIGHTS, BIASES = LAYERS * WIDTH * WIDTH, LAYERS * WIDTH  # elements
FOUR_BITS, EIGHT_BITS = "4bit", "8bit"
# The small GPT-2: features read and made by the linear layers of one of its two blocks, its heads, tokens and positions.
LINEAR = ((64, 192), (64, 64), (64, 256), (256, 64))
HEADS, HEAD_WIDTH, TOKENS, POSITIONS = 4, 16, 32, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))))


def network() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(DEPTH)))


def trained(optimizer: Any = "sgd", build: Any = network, shape: Any = (BATCH, WIDTH), **fields: Any) -> Recording:
    model = GivenModel(build, torch.zeros(shape), lambda m, x: m(x).mean())
    return record(program_of(Job(model, shape[0], optimizer, **fields)))


@cache
def gpt2(optimizer: str | None = None, **fields: Any) -> Recording:
    return record(program_of(Job(lambda: models.load("gpt2", small=True), 2, optimizer, **fields)))


def alive(recording: Recording, at: int | None = None) -> Counter[TensorKind]:
    """Bytes by kind when the last step begins, or at another event."""
    moment = recording.starts[-1] if at is None else at
    found: Counter[TensorKind] = Counter()
    for a in recording.allocations:
        if a.start < moment <= a.end:
            found[a.kind] += a.nbytes
    return found


def kept_for_backward(recording: Recording) -> int:
    """Bytes that the last forward has left when its backward begins, the batch and the loss aside."""
    made = [a for a in recording.allocations if a.start > recording.starts[-1] and a.kind is not TensorKind.INPUT]
    begins = next(a.start for a in made if a.phase is Phase.BACKWARD)
    return sum(a.nbytes for a in made if a.start < begins <= a.end and a.nbytes > 4)


LLAMA = (
    "hf:llama,hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=128,"
    "vocab_size=200,max_position_embeddings=64"
)
UNCUT = 4 * 5 * 64  # the norms, in float32
CUT = 4 * (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 2 * 200 * 64)  # both blocks, the embedding and the output


def llama(optimizer: str | None = None, seq_len: int = 16, **fields: Any) -> Recording:
    return record(program_of(Job(lambda: models.load(LLAMA, seq_len=seq_len), 2, optimizer, **fields)))


NETWORK = GivenModel(network, torch.zeros(BATCH, WIDTH))
