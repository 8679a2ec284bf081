"""Written snapshots have all that PyTorch's have, and PyTorch's own functions take them."""

import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from overspill.core.errors import RequestError
from overspill.placement import ALLOCATE, FREE, TRY, CachingConfig, Events
from overspill.placement.snapshot import Origin, Span, read_snapshot, replay_snapshot, snapshot_of, write_snapshot
from overspill_papers.placement import BfcConfig

MIB = 1 << 20
# torch/csrc/cuda/memory_snapshot.cpp of torch 2.13.
SEGMENT_KEYS = {
    "device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream", "segment_type",
    "segment_pool_id", "is_expandable", "frames", "blocks",
}  # fmt: skip
BLOCK_KEYS = {"address", "size", "requested_size", "state", "frames"}
ENTRY_KEYS = {"action", "size", "stream", "compile_context", "user_metadata", "time_us", "pool_id", "frames"}
# The opcodes that the viewer's reader knows (torch/utils/viz/MemoryViz.js).
VIEWER_OPCODES = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET",
    "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT",
    "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "LONG_BINPUT", "LIST",
    "DICT", "SETITEM",
}  # fmt: skip
EVENTS = Events.from_rows(
    [
        (ALLOCATE, 0, 3 * MIB, 0),
        (ALLOCATE, 1, 100, 1),
        (TRY, 2, 90 * MIB, 0),
        (FREE, 0, 0, 0),
        (FREE, 2, 0, 0),
        (ALLOCATE, 3, 0, 0),
        (ALLOCATE, 0, 30 * MIB, 0),
        (FREE, 3, 0, 0),
        (ALLOCATE, 4, 200 * MIB, 0),
        (ALLOCATE, 5, 1, 0),
    ]
)
ORIGINS = [Origin((("net.py", i, f"op{i}"), ("iteration", 1, "forward")), "weights", f"layer {i}") for i in range(5)]
CONFIGS = {"default": CachingConfig(), "expandable": CachingConfig(expandable_segments=True)}


@pytest.fixture(params=CONFIGS)
def content(request: pytest.FixtureRequest) -> dict[str, Any]:
    return snapshot_of(EVENTS, config=CONFIGS[request.param], capacity_bytes=64 * MIB, origins=ORIGINS)


def test_all_keys_of_the_format_are_there(content: dict[str, Any]) -> None:
    assert set(content) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    (trace,) = content["device_traces"]
    for entry in trace:
        address = "device_free" if entry["action"] == "oom" else "addr"
        assert set(entry) - {"category"} == ENTRY_KEYS | {address}
    for segment in content["segments"]:
        assert set(segment) == SEGMENT_KEYS
        assert all(set(block) == BLOCK_KEYS for block in segment["blocks"])
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    times = [entry["time_us"] for entry in trace]
    assert times == sorted(set(times))


def test_the_run_is_told_in_pytorchs_order(content: dict[str, Any]) -> None:
    kinds = {"segment_map": "gain", "segment_alloc": "gain", "segment_unmap": "loss", "segment_free": "loss"}
    told = [kinds.get(entry["action"], entry["action"]) for entry in content["device_traces"][0]]
    freed = ["free_requested", "free_completed"]
    merged = [action for i, action in enumerate(told) if action != "gain" or told[i - 1] != "gain" or i == 0]
    expected = ["gain", "alloc", "gain", "alloc", "oom", *freed, "gain", "alloc", "loss", "oom"]
    assert [action for action in merged if action != "loss"] == [action for action in expected if action != "loss"]
    if not content["allocator_settings"]["expandable_segments"]:  # whose first pages the last block but one took over
        assert merged[-2] == "loss"
    assert merged[-1] == "oom"


def test_the_viewer_can_read_the_pickle_and_its_categories(tmp_path: Path, content: dict[str, Any]) -> None:
    write_snapshot(tmp_path / "a.pickle", EVENTS, origins=ORIGINS)
    found = {opcode.name for opcode, _, _ in pickletools.genops((tmp_path / "a.pickle").read_bytes())}
    assert found <= VIEWER_OPCODES
    (trace,) = content["device_traces"]
    assert {entry["category"] for entry in trace if "category" in entry} == {"weights", "unknown"}
    assert all("category" in entry for entry in trace if entry["action"] == "alloc")


def test_an_allocation_has_its_frames_everywhere(content: dict[str, Any]) -> None:
    frames = [{"filename": "net.py", "line": 1, "name": "op1"}, {"filename": "iteration", "line": 1, "name": "forward"}]
    (trace,) = content["device_traces"]
    (entry,) = (entry for entry in trace if entry["size"] == 100)
    assert (entry["frames"], entry["user_metadata"], entry["stream"]) == (frames, "layer 1", 1)
    blocks = [block for segment in content["segments"] for block in segment["blocks"]]
    (block,) = (block for block in blocks if block["requested_size"] == 100)
    assert block["frames"] is entry["frames"]  # so the pickle holds them once


def test_pytorchs_own_functions_take_it(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "a.pickle"
    write_snapshot(path, EVENTS, origins=ORIGINS, capacity_bytes=64 * MIB)
    for data in (content, pickle.loads(path.read_bytes())):
        assert "total_reserved: " in _memory_viz.segsum(data)
        told = _memory_viz.trace(data)
        assert "3.0MiB" in told
        assert "raise OutOfMemoryError" in told
        stacks = _memory_viz.memory(data, format_flamegraph=lambda lines: lines)
        assert "stream_0;active_allocated;iteration:1:forward;net.py:0:op0 31457280" in stacks
        assert _memory_viz.segments(data, format_flamegraph=lambda lines: lines).count("iteration:1:forward")
        for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
            assert "add_local_files" in plot(data)
        assert "Active Cached" in _memory_viz.trace_plot(data, plot_segments=True)
        left = _memory_viz.trace_plot(data, filter_freed=True)
        assert "Active Memory Timeline" in left


def test_an_expandable_segment_is_listed_by_its_mapped_stretches() -> None:
    rows = [(ALLOCATE, i, 15 * MIB, 0) for i in range(4)] + [(FREE, 1, 0, 0), (FREE, 2, 0, 0)]
    rows += [(ALLOCATE, 9, 100, 0), (TRY, 10, 500 * MIB, 0)]
    content = snapshot_of(Events.from_rows(rows), config=CONFIGS["expandable"], capacity_bytes=100 * MIB)
    unmapped = [entry for entry in content["device_traces"][0] if entry["action"] == "segment_unmap"]
    assert [entry["size"] for entry in unmapped] == [20 * MIB]
    first, second, small = content["segments"]
    assert [s["segment_type"] for s in content["segments"]] == ["large", "large", "small"]
    assert first["address"] + first["total_size"] + 20 * MIB == second["address"]
    assert small["total_size"] == 2 * MIB
    assert all(segment["is_expandable"] for segment in content["segments"])


def test_spans_are_annotated_in_order(tmp_path: Path) -> None:
    spans = [Span("iteration 1", 0, 3), Span("iteration 2", 3, 1000)]
    content = snapshot_of(EVENTS, spans=spans)
    notes = [(note["stage"], note["name"]) for note in content["external_annotations"]]
    assert notes == [("START", "iteration 1"), ("END", "iteration 1"), ("START", "iteration 2"), ("END", "iteration 2")]
    times = [note["time_us"] for note in content["external_annotations"]]
    assert times == sorted(times)
    assert times[-1] == len(content["device_traces"][0])


def test_other_allocators_runs_can_be_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    write_snapshot(path, EVENTS, allocator="tensorflow", config=BfcConfig(), capacity_bytes=64 * MIB)
    assert "segments: " in _memory_viz.segsum(pickle.loads(path.read_bytes()))


def test_a_run_of_nothing_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    write_snapshot(path, Events.from_rows([]))
    assert read_snapshot(path).segments == ()
    with pytest.raises(RequestError, match=r"device 0; .*_record_memory_history"):
        replay_snapshot(read_snapshot(path))


def test_what_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot write"):
        write_snapshot(tmp_path / "no" / "a.pickle", EVENTS)
    with pytest.raises(RequestError, match="event 0 frees"):
        write_snapshot(tmp_path / "a.pickle", Events.from_rows([(FREE, 0, 0, 0)]))
    with pytest.raises(RequestError, match="event 1 allocates"):
        write_snapshot(tmp_path / "a.pickle", Events.from_rows([(ALLOCATE, 0, 1, 0)] * 2))
