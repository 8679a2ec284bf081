"""Reading snapshots: what is data is read, and everything else ends in one line."""

import contextlib
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from overspill.core.errors import RequestError
from overspill.placement import ALLOCATE, FREE, CachingConfig, Events
from overspill.placement.snapshot import config_of, read_snapshot, replay_snapshot, snapshot_of
from overspill.placement.snapshot.read import TraceEntry
from overspill.placement.snapshot.settings import text_of

MIB = 1 << 20
EVENTS = Events.from_rows(
    [(ALLOCATE, 0, 3 * MIB, 0), (ALLOCATE, 1, 100, 0), (FREE, 0, 0, 0), (ALLOCATE, 2, 12 * MIB, 1), (FREE, 1, 0, 0)]
)
OLD_SEGMENT = {
    "address": 1 << 30,
    "total_size": 2 * MIB,
    "stream": 0,
    "segment_type": "small",
    "blocks": [
        {"size": 512, "state": "active_allocated", "history": [{"real_size": 4}]},
        {"size": 2 * MIB - 512, "state": "inactive"},
    ],
}


class Command:
    """What a malicious pickle holds: a call to be made while it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def saved(content: Any, path: Path, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(RequestError) as caught:
        read_snapshot(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle_is_read(tmp_path: Path, protocol: int) -> None:
    content = snapshot_of(EVENTS)
    assert read_snapshot(saved(content, tmp_path / "a", protocol)) == read_snapshot(saved(content, tmp_path / "b"))


def test_nothing_in_a_pickle_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for protocol in (0, pickle.HIGHEST_PROTOCOL):
        for bad in (Command(os.system, f"touch {mark}"), Command(eval, "1"), Command(Path, "x"), Path, os.system):
            for content in (bad, [bad], {"segments": [], "device_traces": bad}, {bad: 1} if bad is not Path else bad):
                said = refusal(saved(content, tmp_path / "evil.pickle", protocol))
                assert "could run code: it asks for" in said
    assert not mark.exists()


def test_what_is_no_pickle_is_refused(tmp_path: Path) -> None:
    assert "cannot read" in refusal(tmp_path / "absent")
    assert "cannot read" in refusal(tmp_path)
    for content in (b"", b"hello", b"PK\x03\x04", b"\x80\x04", b"\x80\x04}b.", b"\x80\x04K\x01R.", b"\x80\x04)}R."):
        path = tmp_path / "x"
        path.write_bytes(content)
        assert "is not a whole pickle" in refusal(path)


@pytest.mark.long
def test_a_truncated_snapshot_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = saved(snapshot_of(EVENTS), tmp_path / "whole").read_bytes()
    path = tmp_path / "part"
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        refusal(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (3, "Expected `object`, got `int`"),
        ({}, "missing required field `segments`"),
        ({"segments": {}}, "Expected `array`"),
        ({"segments": [{"address": "high", "total_size": 1, "blocks": []}]}, r"got `str` - at `$.segments[0].address`"),
        ({"segments": [{"address": -1, "total_size": 1, "blocks": []}]}, ">= 0"),
        ({"segments": [{"address": 1, "total_size": 1, "blocks": []}]}, "do not add up to its size"),
        ({"segments": [OLD_SEGMENT, OLD_SEGMENT]}, "overlap"),
        ({"segments": [], "device_traces": [[{"size": 1}]]}, "missing required field `action`"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "size": True}]]}, "got `bool`"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "size": 1.5}]]}, "got `float`"),
        ({"segments": [], "allocator_settings": {"max_split_size": []}}, "allocator_settings"),
    ],
)
def test_a_pickle_of_other_things_is_refused_with_the_place(tmp_path: Path, content: Any, said: str) -> None:
    assert said in refusal(saved(content, tmp_path / "x"))


def test_a_list_that_contains_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert "not a memory snapshot" in refusal(saved({"segments": endless}, tmp_path / "x"))


def test_few_bytes_that_stand_for_many_rows_are_refused(tmp_path: Path) -> None:
    row = [{"action": "snapshot"}] * 1000
    path = saved({"segments": [], "device_traces": [row] * 100}, tmp_path / "x")
    assert f"claims 100000 rows in {path.stat().st_size} bytes" in refusal(path)


def test_segments_alone_and_those_of_old_releases_are_read(tmp_path: Path) -> None:
    (segment,) = read_snapshot(saved([OLD_SEGMENT], tmp_path / "x")).segments
    assert [(address - segment.address, block.live) for address, block in segment.placed()] == [(0, True), (512, False)]
    assert not segment.is_expandable
    assert segment.pool == (0, 0)


def test_settings_survive_writing_and_reading(tmp_path: Path) -> None:
    config = CachingConfig(
        max_split_bytes=40 * MIB,
        max_non_split_rounding_bytes=24 * MIB,
        large_segment_bytes=16 * MIB,
        roundup_power2_divisions=(0, 1, 2, 4) * 4,
        garbage_collection_threshold=0.25,
        expandable_segments=True,
        per_process_memory_fraction=0.5,
    )
    read = read_snapshot(saved(snapshot_of(EVENTS, config=config), tmp_path / "x"))
    assert config_of(read) == (config, ())
    assert CachingConfig.parse(text_of(config)) == config
    assert text_of(CachingConfig()) == ""


def test_settings_that_are_not_known_are_noted_and_those_with_a_field_count(tmp_path: Path) -> None:
    content = snapshot_of(EVENTS)
    content["allocator_settings"] |= {"PYTORCH_CUDA_ALLOC_CONF": "new_thing:1", "max_split_size": (1 << 64) - 1}
    config, (note,) = config_of(read_snapshot(saved(content, tmp_path / "x")))
    assert config == CachingConfig()
    assert "new_thing" in note
    del content["allocator_settings"]
    assert "defaults are assumed" in config_of(read_snapshot(saved(content, tmp_path / "x")))[1][0]
    content["allocator_settings"] = {"roundup_power2_divisions": {"1": 4}}
    with pytest.raises(RequestError, match="are not 16 numbers"):
        config_of(read_snapshot(saved(content, tmp_path / "x")))


def test_the_place_of_an_event_is_its_python_line_without_what_a_terminal_would_obey() -> None:
    frames = [
        {"filename": "CUDACachingAllocator.cpp", "line": 0, "name": "malloc"},
        {"filename": "/home/me/net.py", "line": 7, "name": "for\x1b[2Jward"},
    ]
    assert TraceEntry("alloc", frames=frames).place == "net.py:7 for?[2Jward"
    assert TraceEntry("alloc", frames=frames[:1]).place == "CUDACachingAllocator.cpp:0 malloc"
    for odd in (None, 3, [], [3], [{"filename": 3, "name": "x"}], [{"name": "x"}]):
        assert TraceEntry("alloc", frames=odd).place == ""


def _spoil(content: Any, r: random.Random) -> None:
    """Change, drop or repeat something anywhere in `content`."""
    at = content
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            return
        key = r.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and r.random() < 0.9:
            at = at[key]
            continue
        junk = r.choice(
            [None, 0, 1, -1, 512, 2 * MIB, 1 << 70, 1.5, "x", "alloc", "segment_free", "oom", [], {}, (0, 1), True]
        )
        if r.random() < 0.2 and isinstance(at, dict | list):
            del at[key]
        elif r.random() < 0.3 and isinstance(at, list):
            at.insert(key, r.choice(at))
        elif isinstance(at, dict | list):
            at[key] = junk
        return


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(60, 300))])
def test_a_spoilt_snapshot_is_refused_or_replayed_but_never_crashes(tmp_path: Path, seed: int) -> None:
    r = random.Random(seed)
    config = CachingConfig(expandable_segments=seed % 2 == 1)
    content = pickle.loads(pickle.dumps(snapshot_of(EVENTS, config=config, capacity_bytes=24 * MIB)))
    for _ in range(r.choice([1, 1, 2, 4])):
        _spoil(content, r)
    path, capacity = saved(content, tmp_path / "x"), r.choice([None, 24 * MIB])
    with contextlib.suppress(RequestError):
        assert replay_snapshot(read_snapshot(path), capacity_bytes=capacity).events > 0
