"""Ops of a whole step have the layers that they have where Dynamo notes them, and nothing else comes of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import traceback
from torch.utils.checkpoint import checkpoint

import overspill.capture.compiled.step_joint
from overspill.capture.compiled.layer_calls import layers_noted
from overspill.core import Graph, LayerType, Phase
from overspill.job import Job
from overspill.models import BuiltModel
from overspill.runtime.options import Options
from overspill.runtime.preview import preview


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.norm(x)))


class Twice(Nested):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.blocks[1](x))


class Again(Nested):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return self.head(self.norm(checkpoint(self.blocks[1].mlp, x, use_reentrant=False)))


def mean_square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def graph_of(make: Callable[[], nn.Module], *, whole_step: bool, loss: Any = mean_square) -> Graph:
    def build() -> BuiltModel:
        return BuiltModel("nested", make(), lambda size: (torch.ones(size, 8), torch.ones(size, 4)), loss)

    return preview(Job(build, 6, "adamw"), Options(budget="1TiB", policy="liveness", whole_step=whole_step)).graph


def layers_of(graph: Graph) -> list[tuple[Phase, str, str, LayerType]]:
    """What ops of the model and the loss are, and of which layer: a compiled step's is within `model`."""
    return [
        (op.phase, op.name, op.layer.removeprefix("model."), op.layer_type)
        for op in graph.ops
        if op.phase is not Phase.UPDATE and not op.name.startswith(("step.", "ones_like", "copy_", "_native_batch"))
    ]


@pytest.mark.short("Nested")
@pytest.mark.parametrize("make", [Nested, Twice, Again], ids=lambda make: make.__name__)
def test_forward_and_backward_have_the_layers_of_a_compiled_step(make: Callable[[], nn.Module]) -> None:
    whole = layers_of(graph_of(make, whole_step=True))
    assert whole == layers_of(graph_of(make, whole_step=False))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert {"blocks.0.mlp.0", "blocks.0.norm", "blocks.1.mlp.2", "head"} <= {
            found[2] for found in whole if found[0] is phase
        }


def test_updates_are_named_by_parameters_within_the_same_layers() -> None:
    graph = graph_of(Nested, whole_step=True)
    assert {op.layer for op in graph.ops if op.phase is Phase.UPDATE} == {
        name for name, _ in Nested().named_parameters()
    }


@pytest.mark.long
def test_nothing_but_layers_is_other_than_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(graph: Graph) -> Graph:
        return replace(graph, ops=tuple(replace(op, layer="", layer_type=LayerType.OTHER) for op in graph.ops))

    noted = graph_of(Again, whole_step=True)
    monkeypatch.setattr(overspill.capture.compiled.step_joint, "layers_noted", lambda *_: nullcontext())
    plain = graph_of(Again, whole_step=True)
    assert noted != plain
    assert bare(noted) == bare(plain)


def test_a_criterion_is_a_layer() -> None:
    graph = graph_of(Nested, whole_step=True, loss=nn.SmoothL1Loss())
    assert {op.layer_type for op in graph.ops if op.layer == "loss"} == {LayerType.LOSS}
    assert {op.phase for op in graph.ops if op.layer == "loss"} == {Phase.FORWARD, Phase.BACKWARD}


def test_a_model_that_is_one_layer_has_the_ops_names() -> None:
    graph = graph_of(lambda: nn.Linear(8, 4), whole_step=True)
    assert [(op.layer, op.layer_type) for op in graph.ops if op.name == "addmm"] == [("addmm", LayerType.LINEAR)]


def test_modules_are_called_as_before_when_it_is_over_also_by_an_error() -> None:
    plain, noted = nn.Module._call_impl, []

    class Failing(nn.Module):
        def forward(self) -> None:
            noted.append(traceback.current_meta.get("nn_module_stack"))
            raise ValueError("failed")

    outer = nn.Sequential(Failing())
    for module in (outer, nn.Sequential()):
        with pytest.raises(ValueError, match="failed"), layers_noted(module, lambda path: f"my.{path}"):
            outer[0]()
    assert noted == [{"innermost": ("my.0", Failing)}, None]
    assert nn.Module._call_impl is plain
    assert "nn_module_stack" not in traceback.current_meta
