"""The Graph of a whole step: what is in it, what may move, and what happens to each gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from overspill.capture.compiled.graph import InputInfo
from overspill.capture.compiled.whole_step import (
    ACCUMULATE,
    CLIP,
    MUTATION,
    NORM,
    REDUCE,
    UPDATE,
    CapturedStep,
    GradientOps,
    ParameterUpdate,
    StateInfo,
    trace_step,
)
from overspill.core import CollectiveKind, Phase, TensorKind
from overspill.core.errors import UnsupportedError
from overspill.devices import this_cpu
from overspill.policies.in_core import Liveness
from overspill.simulate import check


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))).square().mean()


def nothing(*_: Any) -> None:
    raise AssertionError("a capture computes nothing")


def captured(ops: GradientOps, outside_graph: Any = ()) -> CapturedStep:
    model = Tiny()
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    tensors = [*model.parameters(), *model.buffers()]
    kinds = [TensorKind.PARAMETER] * 5 + [TensorKind.BUFFER] * 3
    infos = [InputInfo(k, n, k is TensorKind.PARAMETER) for k, n in zip(kinds, names, strict=True)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = [torch.empty_like(t, requires_grad=t.requires_grad) for t in tensors] + [torch.empty(6, 3)]

    def step(*given: Tensor) -> Tensor:
        return functional_call(model, dict(zip(names, given, strict=False)), (given[-1],))

    return trace_step(step, model, [*infos, InputInfo(TensorKind.INPUT, "x")], values, ops).captured(outside_graph)  # type: ignore[arg-type]


def updates(state: int = 1) -> tuple[ParameterUpdate, ...]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        kept = tuple(StateInfo(f"moment{i}", torch.empty(4, 3)) for i in range(state))  # type: ignore[arg-type]
    return (ParameterUpdate(0, nothing, kept, workspace_bytes=77), ParameterUpdate(4, nothing))


def names_of(step: CapturedStep) -> list[str]:
    return [op.name for op in step.graph.ops if op.name.startswith("step.")]


def test_each_update_changes_its_parameter_and_its_state() -> None:
    step = captured(GradientOps(updates()))
    first, last = (op for op in step.graph.ops if op.name == UPDATE)
    written = {step.graph.tensors[t].name for t in first.writes}
    assert written == {"first.weight", "first.weight.moment0"}
    assert (first.phase, first.workspace_bytes, last.layer) == (Phase.UPDATE, 77, "last.weight")
    assert str(step.nodes[first.id].meta[MUTATION]) == "the update of first.weight"
    check(step.graph, Liveness().plan(step.graph, this_cpu()))


def test_gradient_ops_come_in_their_order() -> None:
    step = captured(GradientOps(updates(), reduce=nothing, ranks=3, accumulate=nothing, norm=nothing, clip=nothing))
    assert list(dict.fromkeys(names_of(step))) == [ACCUMULATE, REDUCE, NORM, CLIP, UPDATE]
    counts = {name: names_of(step).count(name) for name in (REDUCE, ACCUMULATE, NORM, CLIP, UPDATE)}
    assert counts == {REDUCE: 4, ACCUMULATE: 5, NORM: 2, CLIP: 1, UPDATE: 2}
    sent = [op.collective for op in step.graph.ops if op.name == REDUCE]
    assert {(one.kind, one.ranks) for one in sent if one is not None} == {(CollectiveKind.REDUCE, 3)}
    whole = sum(t.nbytes for t in step.graph.tensors if t.kind is TensorKind.GRADIENT and t.persistent)
    assert sum(one.nbytes for one in sent if one is not None) == whole


def test_accumulated_gradients_and_state_may_move_and_buffers_may_not() -> None:
    step = captured(GradientOps(updates(), accumulate=nothing))
    movable = {t.name for t in step.graph.tensors if t.persistent and t.movable}
    assert movable >= {"first.weight", "first.weight.grad", "first.weight.moment0", "norm.bias"}
    assert not movable & {"norm.running_mean", "x"}


def test_buffers_are_written_back_in_the_graph() -> None:
    step = captured(GradientOps())
    written = {
        step.graph.tensors[t].name for op in step.graph.ops for t in op.writes if step.graph.tensors[t].persistent
    }
    assert written >= {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def test_ops_are_named_after_the_layers_of_the_module() -> None:
    assert {"first", "norm", "last"} <= {op.layer for op in captured(GradientOps()).graph.ops}


def test_what_is_elsewhere_counts_all_the_time() -> None:
    plain = captured(GradientOps(updates()))
    more = captured(GradientOps(updates()), ((TensorKind.OPTIMIZER_STATE, 1000), (TensorKind.INPUT, 0)))
    assert more.graph.persistent_bytes == plain.graph.persistent_bytes + 1000


def test_an_update_without_a_gradient_is_left_out() -> None:
    class Partly(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x).sum()

    model = Partly()
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = [torch.empty_like(p, requires_grad=True) for p in model.parameters()] + [torch.empty(6, 3)]

    def step(*given: Tensor) -> Tensor:
        return functional_call(model, dict(zip(dict(model.named_parameters()), given, strict=False)), (given[-1],))

    infos = [InputInfo(TensorKind.PARAMETER, n, movable=True) for n, _ in model.named_parameters()]
    traced = trace_step(step, model, [*infos, InputInfo(TensorKind.INPUT, "x")], values, GradientOps(updates()))  # type: ignore[arg-type]
    found = traced.captured()
    assert [u.parameter for u in found.updates] == [0]


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = [torch.empty(3, requires_grad=True)]
    with pytest.raises(UnsupportedError, match=r"shape \(3,\)"):
        trace_step(lambda w: 2 * w, nn.Module(), [InputInfo(TensorKind.PARAMETER, "w")], values, GradientOps())  # type: ignore[arg-type]
