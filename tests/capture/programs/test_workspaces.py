"""Collectives in Inductor's programs are not run to be measured: other ranks would have to run them too."""

import ast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from overspill.capture.programs.workspaces import Library, workspace_bytes


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
    assert workspace_bytes(given, {}, values) == list(calls.values())
