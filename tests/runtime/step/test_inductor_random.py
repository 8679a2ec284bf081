"""Random numbers in a whole step with Inductor's kernels: each step is that of stock torch.compile, the generator's state included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
import torch.nn.functional as F
from tests.runtime.random_nets import NETS, WIDTH, Attention, Step, made, trained
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.core.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


def stock(net: type[nn.Module], partition: float) -> list[Step]:
    torch._dynamo.reset()
    model, x = made(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    with (
        torch._functorch.config.patch(activation_memory_budget=partition),
        torch._dynamo.config.patch(allow_rnn=True),
    ):
        compiled = torch.compile(lambda model, x: model(x), dynamic=False, fullgraph=True)

        def step() -> Tensor:
            loss: Tensor = compiled(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return trained(model, step)


def assert_like_stock(net: type[nn.Module], budget: str | float, partition: float | None) -> None:
    torch._dynamo.reset()
    model, x = made(net)
    step = overspill.train_step(
        model, None, torch.optim.SGD(model.parameters(), 0.1), budget=budget, backend="inductor", store="host",
        partition=partition,
    )  # fmt: skip
    found = trained(model, lambda: step(x))
    (taken,) = {p for p in step.partitions if p is not None}
    for mine, expected in zip(found, stock(net, taken), strict=True):
        mine.assert_same(expected)


@pytest.mark.long
@pytest.mark.parametrize("budget", ["1GiB", 0.7, "smallest"])
@pytest.mark.parametrize("net", NETS)
def test_every_step_is_that_of_torch_compile(net: type[nn.Module], budget: str | float) -> None:
    assert_like_stock(net, budget, None)


@pytest.mark.long
@pytest.mark.parametrize("partition", [0.5, 0.25])
@pytest.mark.parametrize("net", NETS)
def test_no_partition_is_taken_that_would_draw_again(net: type[nn.Module], partition: float) -> None:
    with pytest.raises(UnsupportedError, match="draws random"):
        assert_like_stock(net, "smallest", partition)


@pytest.mark.long
def test_every_step_by_a_partition_is_that_of_torch_compile_with_it() -> None:
    assert_like_stock(Attention, "smallest", 0.75)


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
    parted = []

    def partition(*args: Any, **kwargs: Any) -> Any:
        parts = min_cut_rematerialization_partition(*args, **kwargs)
        parted.append([sorted(str(n.target) for n in part.graph.nodes if n.op == "call_function") for part in parts])
        return parts

    for module in ("torch._inductor.compile_fx", "overspill.runtime.compiled.inductor"):
        monkeypatch.setattr(f"{module}.min_cut_rematerialization_partition", partition)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert_like_stock(net, "1GiB", 1.0)
    mine, expected = parted
    assert mine == expected
