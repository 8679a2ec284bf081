"""Each way of capture names the line of the user's Python behind an op, forward and backward, and nobody else's."""

from __future__ import annotations

import os
import site
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx

from overspill.capture.compiled.lines import NodeLines
from overspill.capture.frames import OURS, FrameNumbers, shown_path
from overspill.capture.programs.program import Program
from overspill.capture.recording.graph import graph_of
from overspill.capture.recording.recorder import Recorder
from overspill.capture.virtual_gpu.record import record
from overspill.core import Graph, Op, Phase, TensorKind
from overspill.core.frames import stack_of
from overspill.job import Job
from overspill.models import BuiltModel
from overspill.runtime.options import Options
from overspill.runtime.preview import preview

from .marked import NAME, Again, Net, line, loss_of, train


def job() -> BuiltModel:
    return BuiltModel("marked", Net(), lambda size: (torch.ones(size, 8),), loss_of)


def compiled() -> Graph:
    return preview(Job(job, 64), Options(budget="1TiB", policy="liveness")).graph


def whole_step() -> Graph:
    return preview(Job(job, 64), Options(budget="1TiB", policy="liveness", whole_step=True)).graph


def recorded() -> Graph:
    return graph_of(record(lambda recorder: train(Net(), 3, recorder.start_iteration)), "recorded")


@pytest.fixture(scope="module", params=[compiled, whole_step, recorded], ids=lambda way: way.__name__)
def graph(request: pytest.FixtureRequest) -> Graph:
    way: Callable[[], Graph] = request.param
    return way()


def named(graph: Graph, name: str, phase: Phase = Phase.FORWARD) -> Op:
    return next(op for op in graph.ops if op.name == name and op.phase is phase)


def marks(graph: Graph, op: Op) -> list[int]:
    """The lines of the model's own file in the stack of an op, the outermost first."""
    (stack,) = graph.stacks(op.id)
    return [frame.line for frame in stack if Path(frame.file).name == NAME]


@pytest.mark.parametrize(
    ("op", "backward", "mark", "function"),
    [("sigmoid", "sigmoid_backward", "tail", "forward"), ("exp", "mul", "loss", "loss_of")],
)
def test_a_forward_op_and_its_backward_have_the_line_that_ran_forward(
    graph: Graph, op: str, backward: str, mark: str, function: str
) -> None:
    said = f"{NAME}:{line(mark)} {function}"
    assert graph.source(named(graph, op).id) == said
    assert graph.source(named(graph, backward, Phase.BACKWARD).id) == f"backward of {said}"


def test_the_stack_goes_from_the_outermost_line_to_the_innermost_and_tells_two_calls_apart(graph: Graph) -> None:
    first, second = [op for op in graph.ops if op.name == "tanh"][:2]
    assert marks(graph, first)[-3:] == [line("loss"), line("first"), line("block")]
    assert marks(graph, second)[-3:] == [line("loss"), line("second"), line("block")]
    later, earlier = [op for op in graph.ops if op.name == "tanh_backward"][:2]
    assert [marks(graph, op) for op in (earlier, later)] == [marks(graph, first), marks(graph, second)]


def test_a_backward_that_the_user_wrote_has_its_own_line(graph: Graph) -> None:
    assert marks(graph, named(graph, "pow"))[-1] == line("cube")
    own = [op for op in graph.ops if op.phase is Phase.BACKWARD and marks_of(graph, op) == line("cube backward")]
    assert own
    assert {graph.source(op.id) for op in own} == {f"{NAME}:{line('cube backward')} backward"}


def marks_of(graph: Graph, op: Op) -> int | None:
    return graph.stacks(op.id)[0][-1].line if op.frames else None


def test_no_line_of_torch_of_overspill_or_of_python_appears(graph: Graph) -> None:
    assert graph.frames
    files = {str(Path(frame.file).resolve()) for frame in graph.frames}
    left_out = (*(f"{folder}{os.sep}torch{os.sep}" for folder in site.getsitepackages()), OURS)
    assert not [file for file in files if file.startswith(left_out)]
    assert not [frame for frame in graph.frames if frame.file.startswith(("<", "torch", "overspill"))]


def test_updates_have_the_line_of_the_optimizers_step_where_there_is_one(graph: Graph) -> None:
    found = {graph.source(op.id) for op in graph.ops if op.phase is Phase.UPDATE}
    assert found == ({f"{NAME}:{line('step')} train"} if graph.name == "recorded" else {""})


def test_what_checkpointing_makes_again_has_the_line_of_forward_below_that_of_backward() -> None:
    graph = graph_of(record(lambda recorder: train(Again(), 3, recorder.start_iteration)), "again")
    forward, again = named(graph, "sigmoid"), named(graph, "sigmoid", Phase.BACKWARD)
    assert marks(graph, forward)[-3:] == [line("loss"), line("again"), line("tail")]
    assert graph.source(again.id) == f"{NAME}:{line('tail')} forward"
    assert marks(graph, again)[0] == line("backward")
    after = named(graph, "sigmoid_backward", Phase.BACKWARD)
    assert graph.stacks(after.id)[0][-1].backward


def test_each_allocation_of_a_recording_has_the_line_that_asked_for_it_and_its_shape() -> None:
    recording = record(lambda recorder: train(Net(), 3, recorder.start_iteration))
    found = {(a.kind, recording.source(a.frame), a.shape, a.dtype) for a in recording.allocations}
    assert {
        (TensorKind.PARAMETER, f"{NAME}:{line('cuda')} train", (8, 8), "float32"),
        (TensorKind.INPUT, f"{NAME}:{line('input')} train", (64, 8), "float32"),
        (TensorKind.ACTIVATION, f"{NAME}:{line('block')} forward", (64, 8), "float32"),
        (TensorKind.GRADIENT, f"backward of {NAME}:{line('block')} forward", (8, 8), "float32"),
        (TensorKind.OPTIMIZER_STATE, f"{NAME}:{line('step')} train", (8, 8), "float32"),
    } <= found


def test_a_gradient_that_autograd_adds_up_has_the_line_that_called_backward() -> None:
    recording = record(lambda recorder: train(Net(), 3, recorder.start_iteration))
    assert {recording.source(op.frame) for op in recording.ops if op.name == "detach" and op.layer == "block.fc"} >= {
        f"{NAME}:{line('backward')} train"
    }


def test_storage_that_grows_has_the_line_that_made_it_grow() -> None:
    def program(recorder: Recorder) -> None:
        recorder.start_iteration()
        x = torch.empty(64, device="cuda")
        x.untyped_storage().resize_(1024)

    recording = record(program)
    small, large = recording.allocations
    assert recording.stack(large.frame)[-1].line == recording.stack(small.frame)[-1].line + 1


def test_without_lines_a_recording_is_otherwise_the_same() -> None:
    def program(recorder: Recorder) -> None:
        train(Again(), 2, recorder.start_iteration)

    full, plain = record(program), record(program, lines=False)
    assert plain.frames == ()
    ops = tuple(replace(op, frame=-1) for op in full.ops)
    assert plain == replace(full, ops=ops, allocations=tuple(replace(a, frame=-1) for a in full.allocations), frames=())


def test_frames_are_left_out_but_for_those_of_the_user_and_of_his_packages(tmp_path: Path) -> None:
    packages, standard = site.getsitepackages()[0], sysconfig.get_path("stdlib")
    stack = (
        ("<frozen runpy>", 198, "_run_module_as_main"),
        (f"{standard}/importlib/__init__.py", 126, "import_module"),
        (str(tmp_path / "train.py"), 7, "main"),
        (f"{packages}/transformers/models/bert/modeling_bert.py", 9, "forward"),
        (f"{packages}/torch/nn/modules/linear.py", 134, "forward"),
        (f"{OURS}runtime/training.py", 3, "step"),
        (f"{OURS}models/step.py", 30, "forward"),
        (f"{OURS}models/resnet.py", 69, "forward"),
        ("<eval_with_key>.3", 5, "forward"),
    )
    frames = FrameNumbers()
    innermost = frames.of_stack(stack)
    assert [(frame.file, frame.line) for frame in stack_of(frames.found(), innermost)] == [
        (shown_path(str(tmp_path / "train.py")), 7),
        ("transformers/models/bert/modeling_bert.py", 9),
        ("overspill/models/resnet.py", 69),
    ]


def test_paths_are_relative_where_that_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    file = str(tmp_path / "model.py")
    shown = []
    for folder in (".", "a/b", "a/b/c"):
        monkeypatch.chdir(tmp_path / folder)
        shown.append(shown_path(file))
    assert shown == ["model.py", "../../model.py", file]
    assert shown_path("as/it/is.py") == "as/it/is.py"


def test_what_dynamo_calls_the_rest_of_a_function_is_that_function() -> None:
    node = fx.Graph().call_function(torch.relu)
    node.meta["stack_trace"] = f'  File "{__file__}", line 7, in torch_dynamo_resume_in_forward_at_5\n    x = "File"\n'
    lines = NodeLines()
    (number,) = lines.forward(node)
    assert lines.found()[number].function == "forward"


PROGRAM = """
def call(self, args):
    primals_1, primals_2 = args
    args.clear()
    buf0 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
    # Topologically Sorted Source Nodes: [x, x_1], Original ATen: [aten.t, aten.addmm]
    # [Provenance debug handles] extern_kernels.mm:1
    extern_kernels.mm(primals_1, primals_2, out=buf0)
    cpp_fused_relu_0(buf0)
    return (buf0, )
"""


def test_the_nodes_that_a_comment_of_inductors_names_are_those_of_the_call_below_it() -> None:
    program = Program.read(PROGRAM, {}, "f_")
    assert [s.origins for s in program.statements] == [(), ("x", "x_1"), ()]


@pytest.mark.long
def test_library_calls_of_inductors_programs_have_the_line_of_their_op() -> None:
    options = Options(budget="1TiB", policy="liveness", backend="inductor")
    graph = preview(Job(job, 64), options).graph
    found = {(op.phase, graph.source(op.id)) for op in graph.ops if op.name in ("mm", "addmm")}
    # The product that Inductor joins with the sum of the shared weight's gradients is a node of its own making.
    assert found - {(Phase.BACKWARD, "")} == {
        (Phase.FORWARD, f"{NAME}:{line('block')} forward"),
        (Phase.FORWARD, f"{NAME}:{line('tail')} forward"),
        (Phase.BACKWARD, f"backward of {NAME}:{line('block')} forward"),
        (Phase.BACKWARD, f"backward of {NAME}:{line('tail')} forward"),
    }
