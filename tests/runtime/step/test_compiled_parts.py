"""Blocks and functions that the user has compiled are traced through: the bits of plain eager, and they stay compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import overspill

FACTOR = [1.0]
calls: list[int] = []


def scaled(x: Tensor) -> Tensor:
    return x.sin() * FACTOR[0]


def noted(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A backend that notes each call of what it has compiled."""
    return lambda *given: calls.append(1) or module(*given)


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.linear(x)) * x.mean()


def by_torch_cond(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # compiles its branches itself


def trained(change: Callable[[Any], Any], planned: bool) -> tuple[list[float], nn.Module]:
    """Three losses, and the model; before the last step a value changes that functions behind wrappers read."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(scaled), Block(torch.no_grad()(scaled)), Block(by_torch_cond))
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def plain(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = squares(model, x)
        loss.backward()
        optimizer.step()
        return loss

    step = overspill.train_step(model, squares, optimizer, budget="1MiB", store="host") if planned else plain
    losses = []
    for FACTOR[0] in (1.0, 1.0, 3.0):
        losses.append(step(torch.ones(2, 8)).item())
    return losses, model


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.usefixtures("forget_compiled_code")
@pytest.mark.parametrize(
    "way",
    [
        lambda model: model[0].compile(backend=noted, fullgraph=True),
        lambda model: setattr(model, "0", torch.compile(model[0], backend=noted, fullgraph=True)),
        lambda model: setattr(model[0], "forward", torch.compile(model[0].forward, backend=noted)),
        lambda model: setattr(model[0], "function", torch.compile(scaled, backend=noted)),
        lambda model: model.compile(backend=noted),
    ],
)
def test_what_is_compiled_inside_trains_as_plain_and_stays_compiled(way: Callable[[Any], Any]) -> None:
    losses, model = trained(way, planned=True)
    assert not calls
    assert losses == trained(lambda _: None, planned=False)[0]
    model(torch.ones(2, 8))
    assert calls
    calls.clear()
