"""What `overspill.compile` and `torch.compile` return behaves as users of PyTorch expect of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overspill
from overspill.core.errors import InfeasibleBudget, RequestError
from overspill.core.units import format_apart
from overspill.runtime.training import same_bits


class Net(nn.Module):
    """Convolution, batch norm, dropout and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.2)
        self.middle = nn.Linear(8, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.middle(self.drop(x.mean((2, 3))))))


OPTIONS = {"budget": "1GiB", "policy": "vdnn-all", "store": "host"}
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "overspill.compile": lambda model: overspill.compile(model, budget="1GiB", policy="vdnn-all", store="host"),
    "torch.compile": lambda model: torch.compile(model, backend="overspill", options=dict(OPTIONS), dynamic=False),
}
either_way = pytest.mark.parametrize("compiled_by", WAYS.values(), ids=WAYS.keys())


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))


def train(call: Any, steps: int = 3, seed: int = 7) -> list[float]:
    optimizer = torch.optim.SGD(call.parameters(), lr=0.05, momentum=0.9)
    x, y = batch()
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(one: nn.Module, other: nn.Module) -> None:
    mine, its = ([*m.parameters(), *m.buffers()] for m in (one, other))
    assert all(map(same_bits, mine, its))
    assert len(mine) == len(its)


# -- a budget that is too small


@either_way
def test_a_budget_below_the_floor_is_an_infeasible_budget_that_names_graph_and_shapes(compiled_by: Any) -> None:
    compiled = {
        WAYS["overspill.compile"]: lambda m: overspill.compile(m, budget="64KiB"),
        WAYS["torch.compile"]: lambda m: torch.compile(
            m, backend="overspill", options={"budget": "64KiB"}, dynamic=False
        ),
    }[compiled_by](made())
    x, _ = batch()
    with pytest.raises(InfeasibleBudget, match=r"\(the training graph, on inputs of \(4, 3, 16, 16\)\)$") as training:
        compiled(x)
    assert "\n" not in str(training.value)
    assert training.value.floor_bytes > training.value.budget_bytes == 64 * 1024
    compiled.eval()
    with torch.no_grad(), pytest.raises(InfeasibleBudget, match=r"evaluation graph, on inputs of \(64, 3, 16, 16\)"):
        compiled(x.repeat(16, 1, 1, 1))


def test_sizes_that_read_the_same_are_told_in_bytes() -> None:
    assert format_apart(2**20, 2**20 + 5) == ("1.0 MiB (1048576 bytes)", "1.0 MiB (1048581 bytes)")
    assert format_apart(2**20, 2**21) == ("1.0 MiB", "2.0 MiB")
    with pytest.raises(InfeasibleBudget) as first:
        overspill.compile(made(), budget="64KiB")(batch()[0])
    torch._dynamo.reset()
    least = first.value.floor_bytes
    with pytest.raises(InfeasibleBudget, match=rf"\({least - 1} bytes\) is below .*\({least} bytes\)"):
        overspill.compile(made(), budget=least - 1)(batch()[0])


def test_a_floor_that_the_update_sets_names_the_step_that_would_do() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(InfeasibleBudget, match=r"the optimizer's update takes it, which overspill.train_step would"):
        overspill.compile(model, budget="64KiB", optimizer=optimizer)(torch.randn(2, 256))


def test_an_unknown_option_of_torch_compile_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="unknown option 'bugdet'"):
        torch.compile(made(), backend="overspill", options={"bugdet": "1GiB"})(batch()[0])
