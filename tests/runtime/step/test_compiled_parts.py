"""Blocks and functions that the user has compiled are traced through: the bits of plain eager, and they stay compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import Mlp, Pair
from tests.turns import rest_long
from torch import Tensor, fx, nn

FACTOR = [1.0]
calls: list[int] = []


def noted(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A backend that notes each call of what it has compiled."""
    return lambda *given: calls.append(1) or module(*given)


def scaled(x: Tensor) -> Tensor:
    return x.sin() * FACTOR[0]


without_gradient = torch.no_grad()(lambda x: x.cos() * FACTOR[0])


class Block(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Net(Mlp):
    function = staticmethod(scaled)

    def __init__(self) -> None:
        super().__init__()
        self.middle = Block(*self.middle)

    def forward(self, x: Tensor) -> Tensor:
        branches = torch.cond(x.sum() > 0, torch.sin, torch.cos, (self.first(x),))  # which it compiles itself
        return super().forward(x + self.function(x) + without_gradient(x)) + branches.mean()


WAYS: dict[str, Callable[[Any], Any]] = {
    "a block": lambda model: model.middle.compile(backend=noted, fullgraph=True),
    "a block that is put there": lambda model: setattr(
        model, "middle", torch.compile(model.middle, backend=noted, fullgraph=True)
    ),
    "a forward": lambda model: setattr(model.middle, "forward", torch.compile(model.middle.forward, backend=noted)),
    "a function": lambda model: setattr(model, "function", torch.compile(scaled, backend=noted)),
    "the model": lambda model: model.compile(backend=noted),
}


@pytest.mark.usefixtures("forget_compiled_code")
@pytest.mark.parametrize("way", rest_long(WAYS, ["a block"]))
def test_what_is_compiled_inside_trains_as_plain_and_stays_compiled(way: str) -> None:
    FACTOR[0] = 1.0
    pair = Pair(Net)
    pair.step.close()
    WAYS[way](pair.model)
    pair.unseen = True  # no dispatch mode takes torch.cond
    pair.make_step()
    pair.train(2)
    FACTOR[0] = 3.0
    pair.train()
    assert not calls
    pair.step.close()
    pair.model(pair.inputs[0])
    assert calls
    calls.clear()
