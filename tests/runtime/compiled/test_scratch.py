"""Ops whose results lie in larger buffers: what they take is planned, and a loss does not keep what it was summed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.compiled.lowered import captured_step, plan, run
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.capture.compiled.scratch import TAKEN_ON_CPU
from overspill.capture.programs.allocations import allocations, peak_of
from overspill.devices import this_cpu
from overspill.runtime.reachable import same_bits
from overspill.runtime.transfer.host_store import HostStore
from overspill.simulate import check

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("forget_compiled_code")

LOSSES = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "soft margin": F.soft_margin_loss,
    "binary cross entropy": lambda x, y: F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(y)),
}
NBYTES = 4 * 64 * 500


class Compared(nn.Module):
    """Returns the loss of a linear layer's output against the other input."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(20, 500), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


class Folded(nn.Module):
    """Folds patches into images four times, and keeps these for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.rand(4))

    def forward(self, patches: Tensor) -> Tensor:
        images = [F.fold(patches * weight, (16, 16), 4, stride=2) for weight in self.weights]
        return torch.stack([image.square().mean() for image in images]).sum()


X, ROWS = torch.ones(2, 3, 40, 16), torch.ones(2, 3, 40)
INSIDE: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.native_dropout.default, (X.bfloat16(), 0.1, True)),
    (aten.native_dropout_backward.default, (X, X > 0, 1.1)),
    (aten._safe_softmax.default, (X.half(), -1)),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (X.bfloat16(),) * 3),
    (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (X, X, X, X, X, ROWS, 0.0, False)),
]


@pytest.mark.parametrize(("op", "args"), INSIDE)
def test_what_dropout_and_attention_take_inside_one_op_is_known(op: Any, args: tuple[Any, ...]) -> None:
    with allocations() as found:
        kept = op(*args)
    most, left = peak_of(found.changes)
    del kept
    assert most - left <= TAKEN_ON_CPU[op](*args) <= most - left + (X.nbytes if "attention" in str(op) else 16)


@pytest.mark.short("0.1")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_step_with_dropout_and_attention_stays_within_its_plan(dropout: float) -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(32, 2, 64, dropout, batch_first=True)
    words = torch.randn(4, 64, 32)
    optimizer = torch.optim.SGD(block.parameters(), 0.1)
    step = overspill.train_step(block, lambda m, x: m(x).square().mean(), optimizer, budget="smallest", store="host")
    step(words)
    with step.counted((words,)) as found:
        step(words)
    assert 0.98 * step.plans[0].peak_bytes <= found[0] <= step.plans[0].peak_bytes


class Mixed(nn.Module):
    """Convolutions, a norm that copies its input, and products in bfloat16, to which one of float32 is added."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.LayerNorm(16)
        self.product = nn.Linear(16, 32, dtype=torch.bfloat16)
        self.bias = nn.Parameter(torch.ones(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.norm(self.convolution(x).flatten(2).mT).bfloat16()) + self.bias


def test_a_step_of_convolutions_and_of_products_in_half_precision_stays_within_its_plan() -> None:
    torch.manual_seed(0)
    model, images = Mixed(), torch.randn(8, 3, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = overspill.train_step(model, lambda m, x: m(x).square().mean(), optimizer, budget="smallest", store="host")
    with allocations():  # what ops take is measured under a profiler as well
        step(images)
    with step.counted((images,)) as found:
        step(images)
    assert 0.9 * step.plans[0].peak_bytes <= found[0] <= step.plans[0].peak_bytes
    taken = {op.name: op.workspace_bytes for op in step.plans[0].graph.ops}
    assert min(taken[name] for name in ("convolution", "convolution_backward", "native_layer_norm", "add")) > 4096


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(64, 20), torch.randn(64, 500)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_keeps_its_own_bytes_alone(name: str) -> None:
    x, y = batch()
    model = Compared(LOSSES[name])
    expected = model(x, y)
    assert expected.untyped_storage().nbytes() == NBYTES, "as large as what it is the mean of; else this file can go"
    compiled = overspill.compile(model, budget="1GiB", store="host")
    found = compiled(x, y)
    assert same_bits(found.detach(), expected.detach())
    assert found.untyped_storage().nbytes() == 4
    (plan,) = compiled.overspill.plans
    assert next(op.workspace_bytes for op in plan.graph.ops if "loss" in op.name or "entropy" in op.name) >= NBYTES


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_takes_is_as_planned(name: str) -> None:
    assert_as_planned(Compared(LOSSES[name]), *batch(), policy="auto")


def test_what_a_fold_keeps_is_as_planned() -> None:
    assert_as_planned(Folded(), torch.rand(4, 192, 49), policy="liveness")


def assert_as_planned(model: nn.Module, *inputs: Tensor, policy: str) -> None:
    step = captured_step(model, inputs)
    schedule = plan(step.graph, this_cpu(), policy, share=0.0)
    planned = check(step.graph, schedule).peak_bytes
    ran = run(step, schedule, HostStore())
    assert step.plain.differences(ran.numbers) == []
    assert 0.98 * planned <= ran.peak_bytes <= planned
