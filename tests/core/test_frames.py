"""The lines of Python that ran ops: how they are named, kept and saved."""

import json
from dataclasses import replace
from resource import RUSAGE_SELF, getrusage

import pytest

from overspill.core import Frame, Graph, LayerType, Op, Phase
from overspill.core.frames import FrameTable, source_of, stack_of
from overspill.core.garbage import deep_calls

MAIN = Frame("train.py", 9, "main")
FORWARD = Frame("nets/model.py", 42, "forward", 0)
BACKWARD = replace(FORWARD, backward=True)
OTHER = Frame("C:\\nets\\loss.py", 3, "loss", 0)
FRAMES = (MAIN, FORWARD, BACKWARD, OTHER)


@pytest.fixture
def graph() -> Graph:
    ops = tuple(
        Op(i, "mm", "fc", LayerType.LINEAR, Phase.FORWARD, (), (), frames=frames)
        for i, frames in enumerate(((1,), (2,), (3, 1, 0), ()))
    )
    return Graph("step", (), ops, frames=FRAMES)


def test_a_line_is_named_by_its_file_without_folders() -> None:
    assert [str(frame) for frame in FRAMES] == [
        "train.py:9 main", "model.py:42 forward", "backward of model.py:42 forward", "loss.py:3 loss",
    ]  # fmt: skip


def test_an_op_has_its_line_and_its_stack_with_the_outermost_line_first(graph: Graph) -> None:
    assert [graph.source(i) for i in range(4)] == [
        "model.py:42 forward", "backward of model.py:42 forward", "loss.py:3 loss and 2 more", "",
    ]  # fmt: skip
    assert graph.stacks(1) == ((MAIN, BACKWARD),)
    assert graph.stacks(2) == ((MAIN, OTHER), (MAIN, FORWARD), (MAIN,))
    assert (graph.source(None), graph.stacks(None), graph.stacks(3)) == ("", (), ())


def test_several_ops_of_one_line_are_one_line() -> None:
    assert source_of((MAIN, FORWARD, replace(FORWARD, caller=-1)), (1, 2)) == "model.py:42 forward"


def test_callers_that_go_round_end_and_numbers_of_nothing_are_nothing() -> None:
    assert stack_of((Frame("a", 1, "f", 1), Frame("b", 2, "g", 0)), 1) == (Frame("a", 1, "f", 1), Frame("b", 2, "g", 0))
    assert stack_of((Frame("a", 1, "f", 0),), 0) == (Frame("a", 1, "f", 0),)
    assert stack_of(FRAMES, 9) == ()
    assert source_of(FRAMES, (9, -1)) == ""


def test_a_table_has_each_frame_once() -> None:
    table = FrameTable()
    assert [table.number(frame) for frame in (MAIN, FORWARD, MAIN, FORWARD)] == [0, 1, 0, 1]
    assert table.found() == (MAIN, FORWARD)
    assert table[1] == FORWARD


def test_a_graph_with_lines_survives_json_and_one_saved_before_there_were_any_has_none(graph: Graph) -> None:
    assert Graph.from_json(graph.to_json()) == graph
    old = json.loads(graph.to_json())
    del old["frames"]
    for op in old["ops"]:
        del op["frames"]
    found = Graph.from_json(json.dumps(old))
    assert found == graph.without_frames()
    assert [found.source(op.id) for op in found.ops] == [""] * 4


def test_thousands_of_ops_share_their_stacks_in_a_file(graph: Graph) -> None:
    many = replace(graph, ops=tuple(replace(graph.ops[0], id=i) for i in range(5000)))
    assert len(many.to_json()) - len(many.without_frames().to_json()) < 5000 * len("1") + 1000


def _leaf(a: int) -> int:
    b = c = d = e = f = g = a
    return b + c + d + e + f + g


def _deep(depth: int) -> int:
    if depth:
        return _deep(depth - 1) + 0
    return sum(_leaf(a) for a in range(2000))


def test_no_depth_of_calls_makes_python_map_memory_again_and_again() -> None:
    begun = getrusage(RUSAGE_SELF).ru_minflt
    deep_calls(lambda: [_deep(depth) for depth in range(200)])()
    assert getrusage(RUSAGE_SELF).ru_minflt - begun < 1000
