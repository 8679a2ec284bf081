"""`overspill snapshot`: equal is 0, different is 1, no snapshot is 2, each in one line."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from tests.cli.commands import Overspill

from overspill.placement import ALLOCATE, FREE, CachingConfig, Events
from overspill.placement.snapshot import write_snapshot

MIB = 1 << 20
EVENTS = Events.from_rows(
    [(ALLOCATE, 0, 3 * MIB, 0), (ALLOCATE, 1, 100, 0), (FREE, 0, 0, 0), (ALLOCATE, 2, 30 * MIB, 0)]
)
KEYS = {
    "file", "device", "devices", "events", "compared", "allocations", "frees", "segment_events", "live_at_start",
    "segment_events_equal", "placements_equal", "final_blocks_equal", "equal", "misplaced", "difference", "notes",
    "peak_requested_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "least_capacity_bytes",
    "capacity_above_bytes", "out_of_memory", "retries", "cache_releases", "left_out", "config",
    "reserved_at_start_bytes", "otherwise",
}  # fmt: skip


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot in the current directory, of expandable segments."""
    path = tmp_path / "run.pickle"
    write_snapshot(path, EVENTS, config=CachingConfig(expandable_segments=True))
    return path


def test_an_equal_snapshot_is_told_so(overspill: Overspill, snapshot: Path) -> None:
    done = overspill("snapshot run.pickle --report page.html")
    assert (done.code, done.err) == (0, "")
    assert "The simulated allocator did what the recorded one did" in Path("page.html").read_text(encoding="utf-8")
    for words in (
        "report saved to page.html",
        "8 of 8 replayed",
        "3 allocations, 1 frees",
        "expandable_segments:True",
        "3 compared: equal",
    ):
        assert words in done.out
    answer = overspill("snapshot run.pickle --json").answer
    assert answer.keys() == KEYS
    assert (answer["equal"], answer["difference"], answer["config"]) == (True, None, "expandable_segments:True")
    assert answer["peak_requested_bytes"] == 30 * MIB + 100


def test_a_different_one_has_exit_code_1_and_the_first_difference(overspill: Overspill, snapshot: Path) -> None:
    done = overspill("snapshot run.pickle --json --allocator-config max_split_size_mb:40")
    assert done.code == 1
    assert done.answer["segment_events_equal"] is False
    assert done.answer["config"] == "max_split_size_mb:40"
    assert "the simulated allocator does otherwise than the recorded one: event 1 of 8, alloc of 3.0 MiB" in done.error
    assert "different" in overspill("snapshot run.pickle --allocator-config max_split_size_mb:40").out


def test_it_says_what_planned_addresses_would_save(overspill: Overspill, tmp_path: Path) -> None:
    rows = [(ALLOCATE, 0, 5 * MIB, 0)]
    for turn in range(8):
        a, b, c, d = range(4 * turn + 1, 4 * turn + 5)
        rows += [(ALLOCATE, a, 8 * MIB, 0), (ALLOCATE, b, MIB, 0), (ALLOCATE, c, 11 * MIB, 0), (FREE, a, 0, 0)]
        rows += [(FREE, c, 0, 0), (ALLOCATE, d, 19 * MIB, 0), (FREE, b, 0, 0), (FREE, d, 0, 0)]
    write_snapshot(tmp_path / "steps.pickle", Events.from_rows(rows))
    answer = overspill("snapshot steps.pickle --json").answer["otherwise"]
    assert answer["since"] is not None
    assert answer["requested_bytes"] == 25 * MIB
    assert answer["planned_bytes"] <= answer["expandable_bytes"] < answer["recorded_bytes"]
    assert answer["planned_bytes"] <= 25 * MIB + 4 * MIB
    assert 0 < answer["planned_requests"] < answer["requests"]
    assert "plans are in force from there" in overspill("snapshot steps.pickle").out


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"action": "x"}, "events of kinds unknown here are left out: x; record a run"),
        ({"action": "alloc", "size": 512, "pool_id": (0, 7)}, "1 events of graphs' private pools and of MemPools"),
        ({"action": "snapshot"}, "they are snapshot; record a run"),
    ],
)
@pytest.mark.parametrize("command", ["snapshot", "pack"])
def test_events_none_of_which_can_be_replayed_are_no_equal_snapshot(
    overspill: Overspill, command: str, event: dict[str, object], said: str
) -> None:
    Path("odd.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [[event]]}))
    done = overspill(f"{command} odd.pickle")
    assert (done.code, done.out) == (2, "")
    assert f"none of the 1 events of device 0 can be replayed: {said}" in done.error


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "Missing argument 'FILE.pickle'"),
        ("absent.pickle", "cannot read absent.pickle: No such file"),
        ("evil.pickle", "could run code: it asks for"),
        ("nets.py", "is not a whole pickle"),
        ("run.pickle --device 3", "holds no events of device 3; devices with events: 0"),
        ("run.pickle --device -1", "'--device'"),
        ("run.pickle --capacity much", "'much' is not a size"),
        ("run.pickle --allocator-config expandable_segment:True", "did you mean 'expandable_segments'?"),
    ],
)
def test_a_wrong_request_is_one_line_with_exit_code_2(
    overspill: Overspill, snapshot: Path, command: str, said: str
) -> None:
    class Evil:
        def __reduce__(self) -> object:
            return os.system, ("touch mark",)

    Path("evil.pickle").write_bytes(pickle.dumps(Evil()))
    done = overspill(*f"snapshot {command} --json".split())
    assert done.code == 2
    assert said in done.error
    assert done.answer["exit_code"] == 2
    assert not Path("mark").exists()
