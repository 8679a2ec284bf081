"""Library calls are run to be measured: those of programs, and ops of graphs; but collectives, which other ranks would have to run too."""

import ast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from overspill.capture.programs.workspaces import Library, workspaces, workspaces_of


def test_a_collective_is_not_run_and_takes_what_gloo_takes() -> None:
    with FakeTensorMode():
        values = {"part": torch.empty(1000)}
    namespace = "torch.ops._c10d_functional"  # without a process group, all of these would raise
    calls = {
        f"{namespace}.all_gather_into_tensor.default(part, 4, 'a group')": 16_000,
        f"{namespace}.reduce_scatter_tensor.default(part, 'avg', 4, 'a group')": 4_000,
        f"{namespace}.wait_tensor.default(part)": 0,
    }
    given = [Library(ast.parse(call, mode="eval").body, [], ["part"]) for call in calls]
    assert [found.nbytes for found in workspaces(given, {}, values)] == list(calls.values())


def test_the_workspace_of_an_op_is_what_it_takes_besides_its_result() -> None:
    def plain(x: Tensor) -> Tensor:
        return torch.relu(x)

    def with_copies(x: Tensor) -> Tensor:
        return torch.linalg.inv(x)

    with FakeTensorMode():
        graphs = [make_fx(f)(torch.empty(64, 64)).graph for f in (plain, with_copies)]
    nodes = [next(n for n in graph.nodes if n.op == "call_function") for graph in graphs]
    assert [n.target for n in nodes] == [torch.ops.aten.relu.default, torch.ops.aten.linalg_inv_ex.default]
    none, some = workspaces_of(nodes) or []
    assert none.nbytes == 0 < some.nbytes


def test_an_op_that_no_memory_is_large_enough_for_has_no_measured_workspace() -> None:
    with FakeTensorMode():
        graph = make_fx(lambda x: x + 1)(torch.empty(1 << 50)).graph
    assert workspaces_of([n for n in graph.nodes if n.op == "call_function"]) is None
