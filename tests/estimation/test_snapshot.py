"""An estimate as a snapshot: the run that was simulated, told in names of the model."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from overspill.estimation.api import estimate
from overspill.estimation.estimate import Estimate
from overspill.estimation.memory_viz import write_estimate
from overspill.estimation.peak import CATEGORIES
from overspill.placement.snapshot import read_snapshot, replay_snapshot

MIB = 1 << 20


@pytest.fixture(scope="module", params=["resnet18", "gpt2", "expandable"])
def job(request: pytest.FixtureRequest) -> Estimate:
    if request.param == "expandable":
        return estimate("resnet18", optimizer="adamw", batch=2, allocator_config="expandable_segments:True")
    return estimate(request.param, optimizer="adamw", batch=2)


@pytest.fixture
def path(job: Estimate, tmp_path: Path) -> Path:
    written = tmp_path / "estimate.pickle"
    write_estimate(written, job)
    return written


def content(path: Path) -> dict[str, Any]:
    found = pickle.loads(path.read_bytes())
    assert isinstance(found, dict)
    return found


@pytest.mark.short("resnet18", "expandable")
def test_it_replays_equal_with_the_estimated_peaks(job: Estimate, path: Path) -> None:
    found = replay_snapshot(read_snapshot(path))
    assert found.equal
    assert found.notes == ()
    assert found.peak_requested_bytes == job.peak_requested_bytes
    assert found.peak_allocated_bytes == job.peak_allocated_bytes
    assert found.peak_reserved_bytes == job.peak_reserved_bytes
    told = [(e["action"], e["addr"], e["size"]) for e in content(path)["device_traces"][0] if "segment" in e["action"]]
    assert told == [(e.action, e.address, e.nbytes) for e in job.replayed.segment_events]


def test_every_allocation_names_its_tensor_layer_op_lines_and_phase(job: Estimate, path: Path) -> None:
    allocations = [entry for entry in content(path)["device_traces"][0] if entry["action"] == "alloc"]
    assert len(allocations) == sum(job.demand.nbytes > 0)
    layers = {allocation.layer for allocation in job.recording.allocations if allocation.layer}
    ops = {op.name for op in job.recording.ops}
    for entry in allocations:
        tensor, op, *python, step = entry["frames"]
        original = job.recording.allocations[tensor["line"]]
        assert tensor["name"] in (original.name, "(unnamed)")
        assert op["filename"] in layers | {"(outside layers)"}
        assert op["name"] in ops | {"(no op)"}
        stack = job.recording.stack(original.frame)
        assert [(f["filename"], f["line"]) for f in python] == [(f.file, f.line) for f in reversed(stack)]
        assert step["filename"] == "iteration"
        assert step["name"] in ("construction", "forward", "backward", "update")
        assert entry["category"] in CATEGORIES
    lines = {
        (f["filename"], f["name"]) for entry in allocations for f in entry["frames"] if f["filename"].endswith(".py")
    }
    forward = {(file, name) for file, name in lines if name == "forward"}
    assert {file for file, _ in forward} <= {"overspill/models/resnet.py", "overspill/models/gpt2.py"}
    assert {(file, f"backward of {name}") for file, name in forward} <= lines
    names = {entry["frames"][-1]["name"] for entry in allocations}
    assert names >= {"construction", "forward", "backward", "update"}
    steps = [note["name"] for note in content(path)["external_annotations"] if note["stage"] == "START"]
    assert steps == [f"iteration {i + 1}" for i in range(job.recording.iterations)]


def test_pytorchs_functions_take_it(path: Path) -> None:
    data = content(path)
    assert "total_reserved" in _memory_viz.segsum(data)
    assert "cudaMalloc" in _memory_viz.trace(data) or "segment_map" in _memory_viz.trace(data)
    assert ";iteration:0:construction;" in _memory_viz.memory(data, format_flamegraph=lambda lines: lines)
    assert "add_local_files" in _memory_viz.trace_plot(data)
    assert "add_local_files" in _memory_viz.segment_plot(data)


def test_a_run_without_room_ends_where_the_memory_does(job: Estimate, tmp_path: Path) -> None:
    path = tmp_path / "small.pickle"
    capacity = job.peak_requested_bytes - 2 * MIB
    write_estimate(path, job, capacity_bytes=capacity)
    assert content(path)["device_traces"][0][-1]["action"] == "oom"
    found = replay_snapshot(read_snapshot(path))
    assert found.equal
    assert found.out_of_memory
    assert found.least_capacity_bytes <= capacity
    assert found.capacity_above_bytes is not None
    assert found.capacity_above_bytes > capacity
