"""What a file in the Trace Event Format must be, asked of the file itself: for the traces of plans and of runs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "bp", "pid", "tid", "ts"},
}


def read_trace(path: Path) -> list[Event]:
    """The events at `path`, once they are found to be in order."""
    content = json.loads(path.read_text(encoding="utf-8"))
    events: list[Event] = content["traceEvents"]
    for event in events:
        assert NEEDED[event["ph"]] <= event.keys(), event
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xsf"} <= named
    check_nesting(events)
    check_flows(events)
    check_counters(events)
    return events


def nanoseconds(event: Event) -> tuple[int, int]:
    """When a slice begins and ends."""
    begin = round(event["ts"] * 1000)
    return begin, begin + round(event.get("dur", 0) * 1000)


def check_nesting(events: list[Event]) -> None:
    """On each thread a slice begins behind the one before, or lies within it."""
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(nanoseconds(event))
    for slices in threads.values():
        open_until: list[int] = []
        for begin, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{begin} to {end} ends behind {open_until[-1]}"
            open_until.append(end)


def check_flows(events: list[Event]) -> None:
    """Each flow has one begin and one end behind it, each where a slice of its thread is."""
    ends = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    assert Counter(e["ph"] for e in events if e["ph"] in "sf") == {p: len(e) for p, e in ends.items() if e}
    begins = {(e["pid"], e["tid"], e["ts"]) for e in events if e["ph"] == "X"}
    for number, source in ends["s"].items():
        assert source["ts"] < ends["f"][number]["ts"]
        assert {(e["pid"], e["tid"], e["ts"]) for e in (source, ends["f"][number])} <= begins


def check_counters(events: list[Event]) -> None:
    """Time of a counter does not go back, and it is never below zero."""
    last: dict[tuple[int, str], float] = {}
    for event in events:
        if event["ph"] == "C":
            key = event["pid"], event["name"]
            assert event["ts"] >= last.get(key, 0), event
            assert event["args"]["bytes"] >= 0, event
            last[key] = event["ts"]


def of_process(events: list[Event], pid: int) -> list[Event]:
    """The events of one process."""
    return [event for event in events if event["pid"] == pid]


def counted(events: list[Event], name: str) -> list[int]:
    """The values that a counter takes, in order."""
    return [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["name"] == name]


def named(events: list[Event], what: str) -> list[str]:
    """The names of the processes or threads."""
    return [event["args"]["name"] for event in events if event["name"] == what]
