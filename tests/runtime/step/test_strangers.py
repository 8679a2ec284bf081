"""A step may call other models than its own, and change their buffers as plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import differences
from tests.turns import by_turns
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.core.errors import UnsupportedError
from overspill.runtime.reachable import same_bits

Loss = Callable[["Critic", nn.Module, Tensor, Tensor], Tensor]


class Critic(nn.Module):
    """Judges what the other model makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.norm(self.first(x)).relu(), 0.2))


class Maker(nn.Module):
    """A model with batch norms, dropout and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(12))
        self.register_buffer("seen", torch.zeros(12))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def without_gradient(critic: Critic, maker: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        made = maker(x)
    return F.cross_entropy(critic(made), y)


def with_gradient(critic: Critic, maker: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(maker(x)[:, :5] + critic(x), y) + maker(critic(x).repeat(1, 3)[:, :12]).square().mean()


def counts_only(critic: Critic, maker: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    maker.calls.add_(1)
    return F.cross_entropy(critic(x), y)


def assigns_and_reads(critic: Critic, maker: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    maker.calls += 1
    maker.seen[:3] = x.detach().mean(0)[:3]
    torch.add(maker.seen, 0.5, out=maker.seen)
    return F.cross_entropy(critic(x + maker.seen), y) * (2 if maker.calls > 2 else 1)


def follows_slowly(critic: Critic, maker: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(critic(x), y) + maker.body[0](x).mean()
    with torch.no_grad():
        maker.body[0].weight.lerp_(critic.first.weight[:12], 0.1)
    return loss


def partitioned(loss: Loss, critic: Critic, maker: nn.Module, inputs: list[Tensor], parts: int) -> Tensor:
    total = torch.zeros(())
    for part in zip(*(i.chunk(parts) for i in inputs), strict=True):
        found = loss(critic, maker, *part) / parts
        found.backward()
        total = total + found.detach()
    return total


@pytest.mark.short("with_gradient-options4")
@pytest.mark.parametrize(
    ("loss", "options"),
    by_turns(
        [without_gradient, with_gradient, counts_only, assigns_and_reads, follows_slowly],
        [{"budget": "smallest", "policy": "window"}, {}, {"accumulate": 2}],
    ),
)
def test_tensors_of_other_models_are_changed_as_in_plain_pytorch(loss: Loss, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, maker = Critic(), Maker()
    planned, other = copy.deepcopy(plain), copy.deepcopy(maker)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (plain, planned)]
    step = overspill.train_step(
        planned,
        lambda model, x, y: loss(model, other, x, y),
        optimizers[1],
        **{"budget": "1GiB", "store": "host"} | options,
    )
    for seed, size in enumerate((8, 8, 8, 4, 8)):
        inputs = [torch.randn(size, 12), torch.randint(0, 5, (size,))]
        torch.manual_seed(seed)
        optimizers[0].zero_grad()
        expected = partitioned(loss, plain, maker, inputs, int(options.get("accumulate", 1)))
        optimizers[0].step()
        after = torch.get_rng_state()
        torch.manual_seed(seed)
        assert same_bits(step(*inputs), expected)
        assert torch.equal(torch.get_rng_state(), after)
        assert differences(plain, optimizers[0], planned, optimizers[1]) == []
        assert [n for n, t in maker.state_dict().items() if not same_bits(t, other.state_dict()[n])] == []
    step.close()


def test_a_refused_step_has_changed_nothing_of_other_models() -> None:
    model, other = Critic(), Maker()
    before = copy.deepcopy(other.state_dict())

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        other.calls.add_(1)
        found = F.cross_entropy(model(other(x)), y)
        return found if found > 1 else 2 * found

    step = overspill.train_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), budget="1GiB")
    with pytest.raises(UnsupportedError, match="reads values"):
        step(torch.randn(8, 12), torch.randint(0, 5, (8,)))
    step.close()
    assert all(same_bits(before[name], value) for name, value in other.state_dict().items())
