"""A plan as a memory snapshot: PyTorch's viewer takes it, and the simulated allocator says the same of it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.simulate.graphs import DEVICE, Layer, network, with_lines
from torch.cuda import _memory_viz

from overspill.core import Verb
from overspill.core.frames import stack_of
from overspill.placement.snapshot import read_snapshot, recorded_blocks, replay_snapshot
from overspill.plans.plan import Plan, make_plan
from overspill.report.tracing.memory_viz import write_plan_snapshot

STEP = network([Layer(3 * 2**20, workspace_bytes=100) for _ in range(8)])


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(STEP, DEVICE, "vdnn-all", 64 * 2**20)


@pytest.fixture(scope="module")
def file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("snapshot") / "plan.pickle"
    write_plan_snapshot(plan, path)
    return path


def content_of(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads(file.read_bytes())
    return found


def test_it_is_read_safely_and_replayed_alike(plan: Plan, file: Path) -> None:
    done = replay_snapshot(read_snapshot(file))
    assert done.equal
    assert done.peak_requested_bytes == plan.peak_bytes


def test_each_stay_of_a_tensor_is_an_allocation_that_says_whose(plan: Plan, file: Path) -> None:
    entries = content_of(file)["device_traces"][0]
    kinds = {tensor.name: tensor.kind.value for tensor in plan.graph.tensors}
    made = [e for e in entries if e["action"] == "alloc" and "workspace" not in e["frames"][0]["filename"]]
    assert all(kinds[e["frames"][0]["name"]] == e["frames"][0]["filename"] for e in made)
    again = [e["frames"][0]["name"] for e in made if e["frames"][-1]["name"].startswith(f"{Verb.PREFETCH}, ")]
    assert again == [plan.graph.tensors[t].name for t in plan.schedule.targets(Verb.PREFETCH)]
    assert again
    assert {e["frames"][1]["filename"] for e in made if len(e["frames"]) == 3} <= set(plan.graph.layers)
    assert all(e["category"] for e in made)


def test_the_lines_of_python_stand_between_the_op_and_the_schedule_the_innermost_first(tmp_path: Path) -> None:
    made = make_plan(with_lines(STEP), DEVICE, "vdnn-all", 64 * 2**20)
    write_plan_snapshot(made, tmp_path / "plan.pickle")
    read = read_snapshot(tmp_path / "plan.pickle")
    assert replay_snapshot(read).equal
    y0 = next(t for t in made.graph.tensors if t.name == "y0")
    entries = content_of(tmp_path / "plan.pickle")["device_traces"][0]
    entry = next(e for e in entries if e["action"] == "alloc" and e["frames"][0]["name"] == "y0")
    op = made.graph.ops[made.graph.producer[y0.id]]
    assert [(f["filename"], f["line"], f["name"]) for f in entry["frames"][1:-1]] == [
        (op.layer, op.id, op.name), ("nets/model.py", 100 + op.id, "forward"), ("train.py", 7, "main"),
    ]  # fmt: skip
    assert entry["user_metadata"].endswith(f" | model.py:{100 + op.id} forward")
    blocks = recorded_blocks(read)
    number = next(i for i, b in enumerate(blocks.trace.blocks) if b.name == f"model.py:{100 + op.id} forward")
    lines = [(f.file, f.line) for f in stack_of(blocks.frames, blocks.made_by[number])]
    assert lines == [("train.py", 7), ("nets/model.py", 100 + op.id)], "as the report of the replay shows it"


def test_the_phases_are_annotated(file: Path) -> None:
    marks = [(m["name"], m["stage"]) for m in content_of(file)["external_annotations"]]
    assert marks == [("forward", "START"), ("forward", "END"), ("backward", "START"), ("backward", "END")]


def test_pytorchs_viewer_takes_it(file: Path) -> None:
    content = content_of(file)
    for drawn in (_memory_viz.trace_plot(content), _memory_viz.segment_plot(content)):
        assert "<script" in drawn
    assert "cudaMalloc" in _memory_viz.trace(content)
    assert _memory_viz.segsum(content)


@pytest.mark.long
def test_pytorchs_viewer_takes_it_as_a_command(file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", str(file), "-o", str(page)]
    subprocess.run(command, check=True, capture_output=True)
    assert "MemoryViz" in page.read_text(encoding="utf-8")
