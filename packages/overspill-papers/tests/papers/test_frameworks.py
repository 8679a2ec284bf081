"""A step in the frameworks' layers: by hand on small networks, and valid under every policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from overspill import models
from overspill.core import Graph, LayerType, TensorKind
from overspill.core.errors import InfeasibleBudgetError
from overspill.costs import with_algorithms
from overspill.devices import load_device
from overspill.job import Job
from overspill.models import BuiltModel
from overspill.policies import POLICIES, policy_named
from overspill.runtime.capture_job import step_graph
from overspill.simulate import check
from overspill_papers.papers.frameworks import as_layers

TITAN_X = load_device("titan-x")


def step_of(build: Callable[[], nn.Module], *shape: int) -> Graph:
    def job() -> BuiltModel:
        return BuiltModel("by hand", build(), lambda batch: (torch.randn(batch, *shape),), loss)

    return step_graph(Job(job, 4))


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).sum()


def names(graph: Graph) -> list[str]:
    return [tensor.name for tensor in graph.tensors]


def test_an_activation_takes_the_place_of_its_input_and_its_gradient_that_of_the_incoming_one() -> None:
    before = step_of(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), 3, 16, 16)
    after = as_layers(before)
    relu = next(op for op in after.ops if op.name == "relu")
    assert relu.reads == relu.writes
    assert not relu.recomputable
    maker = after.ops[after.producer[relu.writes[0]]]
    assert maker.name == "convolution"
    assert not maker.recomputable
    backward = next(op for op in after.ops if op.name == "threshold_backward")
    assert set(backward.writes) < set(backward.reads)
    assert len(after.tensors) == len(before.tensors) - 2


def test_an_input_that_another_op_reads_stays() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return torch.relu(y) * y

    before = step_of(Fork, 3, 16, 16)
    assert "relu" in names(before)
    relu = next(op for op in as_layers(before).ops if op.name == "relu")
    assert set(relu.reads).isdisjoint(relu.writes)


def test_an_activation_whose_backward_wants_its_input_stays() -> None:
    before = step_of(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 8, 3)), 3, 16, 16)
    gelu = next(op for op in as_layers(before).ops if op.name == "gelu")
    assert gelu.layer_type is LayerType.ACTIVATION
    assert set(gelu.reads).isdisjoint(gelu.writes)


def test_pooling_saves_no_indices_and_its_backward_reads_its_output() -> None:
    before = step_of(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)), 3, 16, 16)
    assert any(t.dtype == "int64" for t in before.tensors)
    after = as_layers(before)
    assert not any(t.dtype == "int64" for t in after.tensors)
    pool = next(op for op in after.ops if op.name == "max_pool2d_with_indices")
    backward = next(op for op in after.ops if op.name == "max_pool2d_with_indices_backward")
    (made,) = pool.writes
    assert {made, pool.reads[0]} <= set(backward.reads)
    assert after.tensors[made].kind is TensorKind.ACTIVATION
    assert pool.recompute_writes == (made,)


def test_an_activation_does_not_overwrite_what_pooling_still_wants() -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    after = as_layers(step_of(lambda: nn.Sequential(*layers), 3, 16, 16))
    relu = next(op for op in after.ops if op.name == "relu")
    assert set(relu.reads).isdisjoint(relu.writes)


def test_gradients_that_meet_are_summed_in_place() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            return self.two(y) + self.three(y)

    after = as_layers(step_of(Residual, 3, 16, 16))
    forward, backward = (op for op in after.ops if op.name == "add")
    assert set(forward.reads).isdisjoint(forward.writes)
    assert set(backward.writes) < set(backward.reads)


def test_the_numbers_of_ops_and_what_they_are_called_stay() -> None:
    before = step_of(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)), 3, 16, 16)
    after = as_layers(before)
    assert [(op.id, op.name, op.flops) for op in after.ops] == [(op.id, op.name, op.flops) for op in before.ops]
    assert [tensor.id for tensor in after.tensors] == list(range(len(after.tensors)))


@pytest.mark.parametrize(
    "name", ["alexnet", *(pytest.param(n, marks=pytest.mark.long) for n in ("resnet18", "googlenet", "resnet32-cifar"))]
)
def test_every_policy_has_a_valid_schedule_of_a_networks_layers(name: str) -> None:
    plain = step_graph(Job(lambda: models.load(name, small=True), 4))
    graph = with_algorithms(as_layers(plain), TITAN_X)
    unmanaged = check(graph, policy_named("liveness").plan(graph, TITAN_X)).peak_bytes
    assert unmanaged <= check(plain, policy_named("liveness").plan(plain, TITAN_X)).peak_bytes + max(
        op.workspace_bytes for op in graph.ops
    )
    for policy in POLICIES:
        for suffix in ("", ":m"):
            chosen = policy_named(policy + suffix)
            try:
                schedule = chosen.plan(graph, TITAN_X, unmanaged * 3 // 4 if chosen.plans_for_budget else None)
            except InfeasibleBudgetError:
                continue
            check(graph, schedule)
