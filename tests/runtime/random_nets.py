"""Small networks that draw random numbers in several ways, and what training them gives after every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Dropouts(nn.Module):
    """Three dropouts, a weight that two layers share, and a frozen one. The loss is linear in `scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight
        self.second.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.first(x)), 0.3)
        hidden = F.dropout(torch.tanh(self.second(hidden)), 0.4)
        return F.dropout(self.last(hidden) * self.scale, 0.2).square().mean(0).sqrt().sum()


class Attention(nn.Module):
    """Dropout of attention's weights and of what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(0, 1) for t in self.into(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).transpose(0, 1).flatten(1)
        return F.dropout(x + self.out(F.dropout(seen, 0.2)), 0.1).square().mean()


class Lstm(nn.Module):
    """Dropout between two recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.out(self.rnn(self.into(x).unflatten(0, (-1, 4)))[0]), 0.2).square().mean()


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward, with the masks that forward drew; Inductor leaves one op's to a library."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        hidden = F.rrelu(self.first(x), training=True)
        return F.dropout(torch.tanh(self.second(F.dropout(hidden, 0.3))), 0.2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False)  # type: ignore[assignment]
        return F.dropout(x, 0.4).square().mean()


NETS = (Dropouts, Attention, Lstm, Checkpointed)


class Step(NamedTuple):
    """What a step of training left: its loss, the gradients or the weights, and the generator's state."""

    loss: Tensor
    values: list[Tensor]
    generator: Tensor

    def assert_same(self, other: Step) -> None:
        """Raises where a bit differs."""
        assert torch.equal(self.loss, other.loss)
        assert all(map(torch.equal, self.values, other.values))
        assert torch.equal(self.generator, other.generator)


def made(net: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    """A net and its batch, always the same."""
    torch.manual_seed(0)
    return net(), torch.randn(64, WIDTH)


def trained(model: nn.Module, step: Callable[[], Tensor], steps: int = 3) -> list[Step]:
    """What each of the steps left, all from one seed."""
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        loss = step().detach()
        weights = [p if p.grad is None else p.grad for p in model.parameters()]
        found.append(Step(loss, [w.detach().clone() for w in weights], torch.get_rng_state()))
    return found
