"""Random numbers in Inductor's programs: gradients by the masks that forward drew, and the generator where stock torch.compile leaves it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch.nn.functional as F
from tests.runtime.random_nets import NETS, WIDTH, Attention, Dropouts, Step, made, trained
from torch import Tensor, nn

import overspill
from overspill.core.errors import UnsupportedError
from overspill.plans.plan import Plan
from overspill.runtime.compiled.partitions import Partitioned

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


def in_loop(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Step]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = call(x)
        loss.backward()
        optimizer.step()
        return loss

    return trained(model, step)


def stock(net: type[nn.Module], partition: float) -> list[Step]:
    torch._dynamo.reset()
    model, x = made(net)
    with (
        torch._functorch.config.patch(activation_memory_budget=partition),
        torch._dynamo.config.patch(allow_rnn=True),
    ):
        return in_loop(model, torch.compile(model, dynamic=False), x)


def managed(net: type[nn.Module], budget: str | float, partition: float | None = None) -> tuple[list[Step], float]:
    """What the steps left, and the partition that was taken."""
    torch._dynamo.reset()
    model, x = made(net)
    call = overspill.compile(model, budget=budget, backend="inductor", store="host", partition=partition)
    found = in_loop(model, call, x)
    (taken,) = {p for p in call.overspill.partitions if p is not None}
    return found, taken


def assert_like_stock(net: type[nn.Module], budget: str | float, partition: float | None = None) -> None:
    found, taken = managed(net, budget, partition)
    for step, expected in zip(found, stock(net, taken), strict=True):
        step.assert_same(expected)


def slope_and_difference(model: nn.Module, call: Callable[[], Tensor]) -> tuple[float, float]:
    """The derivative of the loss along a direction, by the gradients and by the losses on both sides."""
    drawn = torch.Generator().manual_seed(9)
    weights = [p for p in model.parameters() if p.requires_grad]
    direction = [torch.randn(p.shape, generator=drawn, dtype=p.dtype) for p in weights]

    def at(distance: float) -> float:
        for weight, along in zip(weights, direction, strict=True):
            weight.data.add_(along, alpha=distance)
        model.zero_grad()
        torch.manual_seed(2)
        loss = call()
        loss.backward()
        for weight, along in zip(weights, direction, strict=True):
            weight.data.sub_(along, alpha=distance)
        return loss.item()

    difference = (at(1e-5) - at(-1e-5)) / 2e-5
    at(0.0)
    slope = sum(float((p.grad * d).sum()) for p, d in zip(weights, direction, strict=True) if p.grad is not None)
    return slope, difference


@pytest.mark.long
@pytest.mark.parametrize("last", [1, 9])
def test_gradients_are_the_loss_s_slope_at_the_masks_that_were_drawn(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the partition that saves least is taken."""

    def of_the_last(self: Partitioned[object], plan: Callable[[object], Plan]) -> Plan:
        return plan(list(islice(self, last))[-1])

    monkeypatch.setattr(Partitioned, "best_plan", of_the_last)
    model, x = made(Dropouts)
    model, x = model.double(), x.double()
    call = overspill.compile(model, budget="1GiB", backend="inductor", store="host")
    slope, difference = slope_and_difference(model, lambda: call(x))
    assert slope == pytest.approx(difference, rel=1e-5)


def test_a_partition_that_would_draw_again_is_refused_in_a_line() -> None:
    with pytest.raises(UnsupportedError, match=r"budget=0\.0 .*draws random"):
        managed(Dropouts, "1GiB", 0.0)
    torch._dynamo.reset()
    model, x = made(Dropouts)
    with torch._functorch.config.patch(activation_memory_budget=0.0), pytest.raises(UnsupportedError, match="again"):
        overspill.train_step(model, None, torch.optim.SGD(model.parameters()), budget="1GiB", backend="inductor")(x)


@pytest.mark.long
def test_attention_without_dropout_may_be_computed_again() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            each = self.into(x).view(1, 2, -1, WIDTH)
            return F.scaled_dot_product_attention(each, each, each).square().mean()

    assert_like_stock(Attending, "1GiB", 0.0)


@pytest.mark.long
@pytest.mark.parametrize("budget", ["1GiB", 0.7, "smallest"])
@pytest.mark.parametrize("net", NETS)
def test_every_step_is_that_of_torch_compile(net: type[nn.Module], budget: str | float) -> None:
    assert_like_stock(net, budget)


@pytest.mark.long
@pytest.mark.parametrize("partition", [0.5, 0.25])
@pytest.mark.parametrize("net", NETS)
def test_no_partition_is_taken_that_would_draw_again(net: type[nn.Module], partition: float) -> None:
    with pytest.raises(UnsupportedError, match="draws random"):
        managed(net, "smallest", partition)


@pytest.mark.long
def test_every_step_by_a_partition_is_that_of_torch_compile_with_it() -> None:
    assert_like_stock(Attention, "smallest", 0.75)
