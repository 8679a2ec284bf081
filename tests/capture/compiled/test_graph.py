"""The captured Graph says what the step does: storages and not tensors, kinds, phases, layers, FLOPs, recomputability."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from overspill.core import Graph, LayerType, Phase, TensorKind
from overspill.core.errors import UnsupportedError
from overspill.job import Job
from overspill.models import BuiltModel
from overspill.runtime.options import Options
from overspill.runtime.preview import preview
from overspill.runtime.training import train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8 * 8 * 8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.conv(x))))
        return self.head(self.drop(x).flatten(1))


@pytest.fixture(scope="module")
def graph() -> Graph:
    # Built inside the fake mode of `preview`: no weights are allocated.
    def build() -> BuiltModel:
        return BuiltModel(
            "net", Net(), lambda n: (torch.randn(n, 3, 16, 16),), lambda model, x: model(x).square().mean()
        )

    return preview(Job(build, 4, "adamw"), Options(budget="1TiB", policy="liveness")).graph


def op(graph: Graph, name: str):
    return next(o for o in graph.ops if o.name == name)


def test_phases_follow_one_another_and_the_update_is_last(graph: Graph) -> None:
    order = [list(Phase).index(o.phase) for o in graph.ops]
    assert order == sorted(order)
    assert graph.ops[-1].name == "step.update"
    assert graph.ops[-1].phase is Phase.UPDATE


def test_views_are_no_tensors_of_their_own(graph: Graph) -> None:
    names = {o.name for o in graph.ops}
    assert not names & {"view", "t", "transpose", "permute", "flatten", "reshape", "detach", "expand", "_unsafe_view"}
    dropped = op(graph, "native_dropout").writes[0]
    assert dropped in op(graph, "addmm").reads, "the linear layer reads the dropout's storage through a view"


def test_several_outputs_of_one_op_are_several_tensors(graph: Graph) -> None:
    assert len(op(graph, "max_pool2d_with_indices").writes) == 2
    values, indices = (graph.tensors[t] for t in op(graph, "max_pool2d_with_indices").writes)
    assert (values.dtype, indices.dtype) == ("float32", "int64")
    assert indices.nbytes == 2 * values.nbytes


def test_kinds(graph: Graph) -> None:
    parameters = [t for t in graph.tensors if t.kind is TensorKind.PARAMETER]
    assert sum(t.nbytes for t in parameters) == 4 * sum(p.numel() for p in Net().parameters())
    assert {t.name for t in parameters} >= {"model.conv.weight", "model.norm.bias", "model.head.weight"}
    assert graph.bytes_of(TensorKind.GRADIENT) >= sum(t.nbytes for t in parameters)
    steps = 4 * len(parameters)
    assert graph.bytes_of(TensorKind.OPTIMIZER_STATE) == 2 * sum(t.nbytes for t in parameters) + steps
    assert {t.name for t in graph.tensors if t.kind is TensorKind.BUFFER} == {
        "model.norm.running_mean", "model.norm.running_var", "model.norm.num_batches_tracked", "random state",
    }  # fmt: skip
    convolved = graph.tensors[op(graph, "convolution").writes[0]]
    assert convolved.kind is TensorKind.ACTIVATION, "batch norm's backward reads it"
    assert convolved.nbytes == 4 * 8 * 16 * 16 * 4
    normed = graph.tensors[op(graph, "_native_batch_norm_legit_functional").writes[0]]
    assert normed.kind is TensorKind.TEMPORARY, "relu's backward reads relu's result"


def test_layers_have_the_names_and_types_of_their_modules_in_forward_and_backward(graph: Graph) -> None:
    assert (op(graph, "convolution").layer, op(graph, "convolution").layer_type) == ("model.conv", LayerType.CONV)
    assert (op(graph, "convolution_backward").layer, op(graph, "convolution_backward").layer_type) == (
        "model.conv",
        LayerType.CONV,
    )
    for name, kind in (
        ("_native_batch_norm_legit_functional", LayerType.NORM),
        ("relu", LayerType.ACTIVATION),
        ("max_pool2d_with_indices", LayerType.POOL),
        ("native_dropout", LayerType.DROPOUT),
        ("addmm", LayerType.LINEAR),
    ):
        assert op(graph, name).layer_type is kind


def test_flops_are_torchs_own_count(graph: Graph) -> None:
    model, x = Net(), torch.randn(4, 3, 16, 16)
    with FlopCounterMode(display=False) as counter:
        model(x).square().mean().backward()
    assert sum(o.flops for o in graph.ops) == counter.get_total_flops()


def test_what_may_be_recomputed(graph: Graph) -> None:
    assert not op(graph, "native_dropout").recomputable, "it draws random numbers"
    assert op(graph, "relu").recomputable
    assert not any(o.recomputable for o in graph.ops if o.phase is not Phase.FORWARD)
    norm = op(graph, "_native_batch_norm_legit_functional")
    assert norm.recomputable
    buffers = {t.id for t in graph.tensors if t.kind is TensorKind.BUFFER}
    assert set(norm.reads) & buffers
    assert not set(norm.recompute_reads) & buffers, "made again from the batch alone"
    assert len(norm.recompute_writes) == 3


def test_what_the_caller_holds_cannot_be_moved(graph: Graph) -> None:
    assert not any(t.movable for t in graph.tensors if t.persistent)
    assert all(not graph.tensors[t].movable for t in graph.outputs)
    tangents = op(graph, "step.tangents").writes
    assert tangents
    assert not any(graph.tensors[t].movable for t in tangents)
    gradients = [t for t in op(graph, "step.gradients").reads if t not in tangents]
    assert all(graph.tensors[t].movable for t in gradients), "a finished gradient may wait in the store"


def test_tied_weights_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(32, 32, bias=False)
            self.two = nn.Linear(32, 32, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(F.relu(self.one(x)))

    def build() -> BuiltModel:
        return BuiltModel("tied", Tied(), lambda n: (torch.randn(n, 32),), lambda model, x: model(x).sum())

    found = preview(Job(build, 4), Options(budget="1TiB", policy="liveness")).graph
    assert found.bytes_of(TensorKind.PARAMETER) == 32 * 32 * 4


def test_non_contiguous_and_channels_last_tensors_are_counted_by_their_storage() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.conv(x))[:, ::2].transpose(1, 3).exp()

    def build() -> BuiltModel:
        return BuiltModel(
            "strided",
            Strided(),
            lambda n: (torch.randn(n, 3, 16, 16).to(memory_format=torch.channels_last),),
            lambda model, x: model(x).sum(),
        )

    found = preview(Job(build, 4), Options(budget="1TiB", policy="liveness")).graph
    assert found.tensors[op(found, "convolution").writes[0]].nbytes == 4 * 8 * 16 * 16 * 4
    assert op(found, "relu").writes[0] in op(found, "exp").reads
    assert found.tensors[op(found, "exp").writes[0]].nbytes == 4 * 4 * 16 * 16 * 4


def test_the_graph_survives_json(graph: Graph) -> None:
    assert Graph.from_json(graph.to_json()) == graph


def test_dynamic_shapes_are_no_graph_of_ours() -> None:
    from overspill.capture.compiled.joint import JointGraph

    captured = []

    def backend(module, inputs):
        from torch._dynamo.backends.common import aot_autograd

        def keep(joint, *_, **__):
            captured.append(joint)
            raise UnsupportedError("seen enough")

        return aot_autograd(fw_compiler=lambda g, _: g, partition_fn=keep)(module, inputs)

    torch._dynamo.reset()
    with pytest.raises(Exception, match="seen enough"):
        torch.compile(nn.Linear(8, 8), backend=backend, dynamic=True)(torch.randn(4, 8))
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match="dynamic shapes"):
        JointGraph(captured[0], 1)


class Wide(nn.Module):
    """A convolution whose weight is most of the step, on images in channels-last: so is then the gradient of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 96, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.to(memory_format=torch.channels_last)).square().mean()


def test_a_gradient_that_lies_otherwise_than_its_parameter_is_there_twice_for_a_moment() -> None:
    job = BuiltModel("wide", Wide(), lambda batch: (torch.randn(batch, 64, 4, 4),), lambda module, x: module(x))
    run = train(Job(lambda: job, 2), Options("100%"))
    assert run.plan is not None
    gradients = next(op for op in run.plan.graph.ops if op.name == "step.gradients")
    assert gradients.workspace_bytes == job.module.conv.weight.nbytes
    assert 0.98 * run.planned_peak_bytes <= run.measured_peak_bytes <= run.planned_peak_bytes
