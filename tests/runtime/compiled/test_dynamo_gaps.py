"""What Dynamo passes over without a word is followed or refused by `overspill.compile`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.turns import by_turns
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import overspill
from overspill.errors import RequestError, UnsupportedError
from overspill.pytorch.dynamo import IDENTITY
from overspill.runtime.reachable import same_bits

pytestmark = pytest.mark.usefixtures("forget_compiled_code")
NOW: dict[str, Any] = {}


class Model(nn.Module):
    """A layer, and what `then` does with its output; `at` gives a call's inputs, and makes two equal objects."""

    def __init__(self, then: Callable[[Any, Tensor], Tensor], make: Callable[[], Any] = list) -> None:
        super().__init__()
        self.layer, self.then, self.make = nn.Linear(4, 4), then, make

    def at(self, call: int) -> tuple[Tensor, Tensor]:
        self.one, self.two = self.make(), self.make()
        self.now = NOW["global"] = (self.one, self.two)[call % 2]
        data, start = torch.randn(12, 4), (4, 2, 3, 0)[call]
        return data[:4], data[start : start + 4]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.then is writes:
            x[:3].mul_(2)
        return self.then(self, self.layer(x + y))


def writes(_: Any, x: Tensor) -> Tensor:
    return x.tanh()


def adds(of: Any, x: Tensor) -> Tensor:
    of.now.append(1.0)
    of.made = Made()
    return x * len(of.one)


def asks(of: Any, x: Tensor) -> Tensor:
    return x if of.now is of.one else x * 2


def asks_for_a_global(of: Any, x: Tensor) -> Tensor:
    return x if NOW["global"] is not of.two else x * 2


class Made:
    """An object that forward makes, which no guard can look at."""

    def __init__(self) -> None:
        self.parts = [1.0]


class Half(torch.autograd.Function):
    """A sine with a backward of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sin(x)

    @staticmethod
    def setup_context(*_: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 0.5


def of_half(x: Tensor) -> Tensor:
    return (Half.apply(x) * x).sum()


def gradient(_: Any, x: Tensor) -> Tensor:
    return x + torch.func.grad(of_half)(x)


def penalised(_: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad(of_half(x), x, create_graph=True)[0]


EQUAL = (list, dict, SimpleNamespace, lambda: (*[1.0],), lambda: lambda: NOW)
FOLLOWED = [*((asks, make) for make in EQUAL), (asks_for_a_global, set), (adds, list), (writes, list), (gradient, list)]


@pytest.mark.short("case0-calls0", "case4-calls4", "case8-calls8", "case15-calls15", "case19-calls19")
@pytest.mark.skipif(not IDENTITY[0].is_there, reason="PyTorch 2.11 does not let its answers to `is` be replaced")
@pytest.mark.parametrize(
    ("case", "calls"),
    by_turns([*FOLLOWED, (lambda _, x: torch.func.vjp(Half.apply, x)[1](x)[0], list)], [(0, 1, 2, 3, 1, 0), (1, 0, 1)]),
)
def test_what_dynamo_passes_over_is_as_in_plain_pytorch(case: tuple[Any, Any], calls: tuple[int, ...]) -> None:
    then, make = case
    model = Model(then, make)
    compiled = overspill.compile(model, budget="1GiB")
    for call in calls:
        found = []
        for run in (model, compiled):
            torch.manual_seed(call)
            inputs = model.at(call)
            model.zero_grad()
            run(*inputs).square().sum().backward()
            found.append((*inputs, model.layer.weight.grad))
        assert all(map(same_bits, *found))
    if make is not list:
        assert len(compiled.overspill.plans) == 2, "inputs that overlap and are only read have one plan"


def rounded(*how: Any) -> saved_tensors_hooks:
    return saved_tensors_hooks(*(how or (lambda t: t.bfloat16(), lambda t: t.float())))


def rounds(_: Any, x: Tensor) -> Tensor:
    with rounded():
        return x.tanh().sin()


GRAPHS = [torch.fx.symbolic_trace(of) for of in (lambda t: t.bfloat16(), lambda t: t.float())]


@pytest.mark.parametrize(
    ("then", "around"),
    [(penalised, nullcontext), (rounds, nullcontext), (writes, rounded), (writes, lambda: rounded(*GRAPHS))],
)
def test_what_cannot_be_followed_is_refused(then: Any, around: Any) -> None:
    model = Model(then)
    with around(), pytest.raises(UnsupportedError, match=r"saved_tensors_hooks|create_graph"):
        overspill.compile(model, budget="smallest")(*model.at(0))


@pytest.mark.long
def test_what_a_function_under_torch_func_keeps_is_told() -> None:
    with pytest.warns(UserWarning, match="does not trace"):
        overspill.compile(Model(gradient), budget="smallest")(*torch.randn(2, 4096, 4))


def test_a_layer_that_is_not_initialised_is_refused_until_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.LazyLinear(2))
    compiled, x = overspill.compile(model, budget="1GiB"), torch.randn(8, 4)
    with pytest.raises(RequestError, match="LazyLinear"):
        compiled(x)
    model(x)
    with save_on_cpu():  # hooks that give back what they are given are no reason to refuse
        compiled(x).sum().backward()
