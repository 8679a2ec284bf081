"""A step may read random numbers that it draws: it goes the way that plain PyTorch goes with the same generator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.runtime.step.test_values import Net, Sides, batch
from tests.turns import by_turns
from torch import Tensor

from overspill.core.errors import UnsupportedError
from overspill.runtime.step import plans

Loss = Callable[[Net, Tensor, Tensor], Tensor]


def drops_layers(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    """LayerDrop, with dropouts between."""
    for _ in range(2):
        if torch.rand([]) < 0.5:
            continue
        x = x + net(x)
    return net(x).square().mean()


def reads_behind_dropout_of_two_shapes(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    y = net(x)
    kept = torch.nn.functional.dropout(net.first(x), 0.1).sum() + torch.randn(3, 7).sum()
    return (y.square().mean() if torch.rand(1) < 0.5 else y.abs().mean()) + kept * 1e-3


def reads_behind_attention(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    """Attention without dropout draws nothing."""
    y = net(x)
    turned = y.view(2, 2, -1, y.shape[-1])
    y = y + torch.nn.functional.scaled_dot_product_attention(turned, turned, turned).view_as(y)
    return y.square().mean() if torch.rand([]) < 0.5 else y.abs().mean()


def checks_behind_draws(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    """A check that is tried both ways, behind a mask that is drawn in place then."""
    y = torch.nn.functional.dropout(net(x), 0.1)
    if torch.rand([]) < 0.5:
        y = y * 2
    return -torch.distributions.Normal(y[:, 0], y[:, 1].exp(), validate_args=True).log_prob(x[:, 0]).mean()


def chooses(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    rows = torch.randint(0, 3, (1,)).item()
    return net(x[rows:]).square().mean() + torch.rand_like(x).mean()


def chooses_rows(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    kept = torch.bernoulli(torch.full((3,), 0.5)).bool()
    return net(x[:3][kept]).square().sum() + net(x).square().mean()


def never(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    for _ in range(5):
        x = net(x) + x
        if torch.rand([]) < 0.0:
            x = x * 2
    return x.square().mean()


MOST = {
    drops_layers: 4,
    reads_behind_dropout_of_two_shapes: 2,
    reads_behind_attention: 2,
    chooses: 3,
    chooses_rows: 4,
    never: 1,
}
"""Of each loss, how many plans it may need."""


@pytest.mark.short("chooses-options9", "drops_layers-options0", "never-options17", "reads_behind_attention-options8")
@pytest.mark.parametrize(
    ("loss", "options"), by_turns(MOST, [{}, {"accumulate": 2}, {"budget": "smallest", "policy": "window"}])
)
def test_what_is_drawn_is_read_as_in_plain_pytorch(loss: Loss, options: dict[str, object]) -> None:
    sides = Sides(loss, **options)
    for seed in range(6):
        sides.train(*batch(seed))
    assert len(sides.step.plans) <= MOST[loss] * int(options.get("accumulate", 1))


def test_a_draw_that_follows_from_weights_is_refused() -> None:
    def loss(net: Net, x: Tensor, mask: Tensor) -> Tensor:
        y = net(x)
        return y.mean() if torch.bernoulli(y.sigmoid()).any() else y.sum()

    with pytest.raises(UnsupportedError, match="reads values"):
        Sides(loss).step(*batch(0))


def test_a_draw_behind_one_that_nobody_can_repeat_is_refused() -> None:
    def loss(net: Net, x: Tensor, mask: Tensor) -> Tensor:
        y = net(x) + torch.poisson(net(x).abs().detach())
        return y.mean() if torch.rand([]) < 0.5 else y.sum()

    with pytest.raises(UnsupportedError, match="reads values"):
        Sides(loss).step(*batch(0))


def test_a_number_that_never_comes_again_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(net: Net, x: Tensor, mask: Tensor) -> Tensor:
        return net(x).square().mean() * torch.rand([]).item()

    monkeypatch.setattr(plans, "MOST_ANSWERS", 3)
    sides = Sides(loss)
    for seed in range(3):
        sides.train(*batch(seed))
    with pytest.raises(UnsupportedError, match=r"3 different.*layerdrop"):
        sides.train(*batch(3))
