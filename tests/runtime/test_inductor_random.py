"""Random numbers in Inductor's programs: each step, by either way in, is that of stock torch.compile, the generator's state included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch.nn.functional as F
from tests.runtime.random_nets import NETS, WIDTH, Attention, Dropouts, Step, made, trained
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.core.errors import UnsupportedError
from overspill.plans.fit import Fit
from overspill.plans.plan import Plan
from overspill.runtime.compiled.partitions import Partitioned

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

COMPILE, TRAIN_STEP = "compile", "train_step"
by_both = pytest.mark.parametrize("way", [COMPILE, TRAIN_STEP])


def in_loop(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, way: str) -> list[Step]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = call(x)
        loss.backward()
        optimizer.step()
        if way == TRAIN_STEP:  # of which no gradients are left
            optimizer.zero_grad()
        return loss

    return trained(model, step)


def stock(net: type[nn.Module], partition: float, way: str) -> list[Step]:
    torch._dynamo.reset()
    model, x = made(net)
    with torch._functorch.config.patch(activation_memory_budget=partition), torch._dynamo.config.patch(allow_rnn=True):
        if way == COMPILE:
            return in_loop(model, torch.compile(model, dynamic=False), x, way)
        loss = torch.compile(lambda model, x: model(x), dynamic=False, fullgraph=True)
        return in_loop(model, partial(loss, model), x, way)


def managed(net: type[nn.Module], budget: str | float, partition: float | None, way: str) -> tuple[list[Step], float]:
    """What the steps left, and the partition that was taken."""
    torch._dynamo.reset()
    model, x = made(net)
    asked: dict[str, Any] = {"budget": budget, "backend": "inductor", "store": "host", "partition": partition}
    if way == COMPILE:
        call = overspill.compile(model, **asked)
        found, planned = in_loop(model, call, x, way), call.overspill
    else:
        planned = overspill.train_step(model, None, torch.optim.SGD(model.parameters(), 0.1), **asked)
        found = trained(model, lambda: planned(x))
    (taken,) = {p for p in planned.partitions if p is not None}
    return found, taken


def assert_like_stock(net: type[nn.Module], budget: str | float, partition: float | None, way: str) -> None:
    found, taken = managed(net, budget, partition, way)
    for step, expected in zip(found, stock(net, taken, way), strict=True):
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

    def of_the_last(self: Partitioned[object], search_in: Callable[[object], Fit]) -> Plan:
        return search_in(list(islice(self, last))[-1]).plan()

    monkeypatch.setattr(Partitioned, "best_plan", of_the_last)
    model, x = made(Dropouts)
    model, x = model.double(), x.double()
    call = overspill.compile(model, budget="1GiB", backend="inductor", store="host")
    slope, difference = slope_and_difference(model, lambda: call(x))
    assert slope == pytest.approx(difference, rel=1e-5)


def test_a_partition_that_would_draw_again_is_refused_in_a_line() -> None:
    with pytest.raises(UnsupportedError, match=r"budget=0\.0 .*draws random"):
        managed(Dropouts, "1GiB", 0.0, COMPILE)
    with torch._functorch.config.patch(activation_memory_budget=0.0), pytest.raises(UnsupportedError, match="again"):
        managed(Dropouts, "1GiB", None, TRAIN_STEP)


@pytest.mark.long
def test_attention_without_dropout_may_be_computed_again() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            each = self.into(x).view(1, 2, -1, WIDTH)
            return F.scaled_dot_product_attention(each, each, each).square().mean()

    assert_like_stock(Plain, "1GiB", 0.0, COMPILE)


@pytest.mark.long
@by_both
@pytest.mark.parametrize("budget", ["1GiB", 0.75, "smallest"])
@pytest.mark.parametrize("net", NETS)
def test_every_step_is_that_of_torch_compile(net: type[nn.Module], budget: str | float, way: str) -> None:
    assert_like_stock(net, budget, None, way)


@pytest.mark.long
@by_both
@pytest.mark.parametrize("net", NETS)
def test_no_partition_is_taken_that_would_draw_again(net: type[nn.Module], way: str) -> None:
    with pytest.raises(UnsupportedError, match="draws random"):
        managed(net, "smallest", 0.25, way)


@pytest.mark.long
@by_both
def test_every_step_by_a_partition_is_that_of_torch_compile_with_it(way: str) -> None:
    assert_like_stock(Attention, "smallest", 0.75, way)


class Attending(nn.Module):
    """A checkpoint with attention, which is random by its tags, and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)

    def block(self, x: Tensor) -> Tensor:
        each = self.into(x).view(1, 2, -1, WIDTH)
        return F.dropout(F.scaled_dot_product_attention(each, each, each).view_as(x), 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant).square().mean()

    reentrant = False


class Reentrant(Attending):
    reentrant = True


@pytest.mark.long
@pytest.mark.parametrize("net", [Attending, Reentrant])
def test_a_checkpoint_is_parted_as_torch_compile_parts_it(
    net: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    partitioned = []

    def partition(*args: Any, **kwargs: Any) -> Any:
        parts = min_cut_rematerialization_partition(*args, **kwargs)
        partitioned.append(
            [sorted(str(n.target) for n in part.graph.nodes if n.op == "call_function") for part in parts]
        )
        return parts

    for module in ("torch._inductor.compile_fx", "overspill.runtime.compiled.inductor"):
        monkeypatch.setattr(f"{module}.min_cut_rematerialization_partition", partition)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert_like_stock(net, "1GiB", 1.0, TRAIN_STEP)
    mine, expected = partitioned
    assert mine == expected
