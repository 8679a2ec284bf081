"""Gradients of gradients, and functions that update buffers in forward and in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.runtime.compiled.either_way import batch, either_way, made, same_gradients
from torch import Tensor, nn

import overspill
from overspill.core.errors import OverspillError, UnsupportedError
from overspill.runtime.reachable import same_bits

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


def penalty(call: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    return gradient.square().sum()


class Smooth(nn.Module):
    """Returns a view of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).t()


@either_way
def test_a_second_backward_is_refused_with_what_to_do(compiled_by: Any) -> None:
    torch.manual_seed(0)
    model, plain, x = Smooth(), Smooth(), torch.randn(4, 8)
    plain.load_state_dict(model.state_dict())
    compiled = compiled_by(model)
    with pytest.raises(OverspillError, match=r"compile\(loss_fn\).*_orig_mod") as error:
        penalty(compiled, x).backward()
    assert "\n" not in str(error.value)
    for call, own in ((plain, plain), (compiled, compiled._orig_mod)):
        call.zero_grad()
        (call(x).square().sum() + penalty(own, x)).backward()
    assert same_gradients(model, plain)


class Penalised(Smooth):
    """Returns its loss, in which there is a gradient of it, and a gradient of that."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (first[:, 1] - second[:, 0]).square().mean()


@pytest.mark.parametrize(("as_function", "budget"), [(False, "smallest"), (True, "1GiB")])
def test_a_loss_with_gradients_in_it_is_planned_with_them(as_function: bool, budget: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, model, x = Penalised(), Penalised(), torch.randn(64, 8)
    plain.load_state_dict(model.state_dict())

    def loss_of(x: Tensor) -> Tensor:
        return model(x)

    call = overspill.compile(loss_of if as_function else model, budget=budget)
    for _ in range(2):
        assert same_bits(call(x), plain(x))
        for each in (call, plain):
            each(x).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(p.grad, q.grad) if q.grad is not None else p.grad is None
    assert max(len(plan.graph.ops) for plan in call.overspill.plans) > 40


def test_a_graph_of_gradients_that_nobody_differentiates_is_no_harm() -> None:
    plain, model = made(), made()
    compiled = overspill.compile(model, budget="1GiB")
    for call in (plain, compiled):
        torch.manual_seed(1)
        gradients = torch.autograd.grad(call(batch()[0]).sum(), list(call.parameters()), create_graph=True)
        for parameter, gradient in zip(call.parameters(), gradients, strict=True):
            parameter.grad = gradient.detach()
    assert same_gradients(model, plain)


class Largest(torch.autograd.Function):
    """Scales by a history of the largest values of what comes in forward, and of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor, gradients: Tensor | None) -> Tensor:
        ctx.gradients = seen if gradients is None else gradients
        seen[0] = x.abs().max()
        return x / (1 + seen[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        scaled = gradient * (1 + ctx.gradients.max())
        ctx.gradients[1] = gradient.abs().max()
        return scaled, None, None


class Scaled(Smooth):
    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.shared = shared
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("gradients", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return Largest.apply(super().forward(x), self.seen, None if self.shared else self.gradients).square().mean()


def losses_of(model: nn.Module, one: Any) -> list[Any]:
    losses = [one(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))) for seed in range(3)]
    return [*losses, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.parametrize("way", ["compile", "train_step", "shared, train_step"])
def test_a_function_that_updates_buffers_in_forward_and_in_backward_gives_the_same_numbers(way: str) -> None:
    results = []
    for planned in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Scaled(shared="shared" in way)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call = overspill.compile(model, budget="1GiB") if planned and way == "compile" else model

        def one(x: Tensor, call: Any = call, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = call(x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        if planned and "train_step" in way:
            one = overspill.train_step(model, lambda m, x: m(x), optimizer, budget="1GiB")
        results.append(losses_of(model, one))
    assert all(map(same_bits, *results))


def test_one_buffer_that_forward_and_backward_both_update_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match=r"a buffer .*overspill\.train_step"):
        overspill.compile(Scaled(shared=True), budget="1GiB")(torch.randn(4, 8))
