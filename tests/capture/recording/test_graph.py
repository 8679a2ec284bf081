"""An eager recording and a compiled capture tell the same story in the same noun."""

import pytest

from overspill import models
from overspill.capture.recording.graph import graph_of
from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.record import record
from overspill.core import Graph, Phase, TensorKind
from overspill.core.errors import RequestError
from overspill.devices import load_device
from overspill.estimation.programs import program_of
from overspill.job import Job
from overspill.plans.plan import make_plan
from overspill.runtime.options import Options
from overspill.runtime.preview import preview


def recorded(name: str, optimizer: str) -> Recording:
    program = program_of(Job(lambda: models.load(name, small=True), 4, optimizer))
    return record(program)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in ("vgg11", "resnet18", "unet"))]
)
def test_its_persistent_tensors_and_gradients_are_those_of_the_compiled_capture(name: str) -> None:
    eager = graph_of(recorded(name, "momentum"), name)
    training = Job(lambda: models.load(name, small=True), 4, "momentum")
    compiled = preview(training, Options(budget=None, policy="liveness", device=load_device("t4"))).graph

    def weights(graph: Graph) -> int:
        return sum(t.nbytes for t in graph.tensors if t.kind is TensorKind.PARAMETER)

    assert weights(eager) == weights(compiled) > 0
    gradients = sum(t.nbytes for t in eager.tensors if t.kind is TensorKind.GRADIENT and not t.persistent)
    assert gradients == weights(eager)
    assert {op.phase for op in eager.ops} == set(Phase)


@pytest.mark.parametrize("policy", ["in-core", "liveness", "vdnn-all", "auto"])
def test_policies_plan_on_it(policy: str) -> None:
    graph = graph_of(recorded("resnet18", "sgd"), "resnet18")
    plan = make_plan(graph, load_device("t4"), policy, 1 << 34)
    assert plan.peak_bytes >= graph.persistent_bytes


def test_liveness_on_it_has_the_peak_that_was_recorded() -> None:
    recording = recorded("resnet18", "sgd")
    graph = graph_of(recording, "resnet18")
    plan = make_plan(graph, load_device("t4"), "liveness", 1 << 34)
    # Autograd and Python names hold some tensors longer than their last use; never shorter.
    assert 0.7 * recording.peak_requested_bytes <= plan.peak_bytes <= recording.peak_requested_bytes


def test_an_iteration_that_was_not_recorded_is_refused() -> None:
    with pytest.raises(RequestError, match="iteration 3"):
        graph_of(recorded("gpt2", "sgd"), "gpt2", iteration=3)
