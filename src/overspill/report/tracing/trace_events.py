"""Write Chrome's Trace Event Format, for Perfetto.

ui.perfetto.dev and chrome://tracing open it. The keys are those of the format's document ("Trace Event Format",
Google): `ph` is `X` for a slice, `C` for a counter, `s` and `f` for the ends of a flow, `M` for names. The format's
times are microseconds. Ours are whole nanoseconds, so that rounding never makes consecutive slices overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from overspill.core.files import write_whole

BAD = "terrible"
"""The reserved colour name for undesirable times, as waiting."""


class Process:
    """One process of a trace, on its own clock in seconds.

    It has threads, slices, counters and flows.
    """

    def __init__(self, pid: int, name: str, threads: Iterable[str]) -> None:
        self.pid = pid
        self.events: list[dict[str, Any]] = [self._named("process_name", 0, name=name)]
        self.events.append(self._named("process_sort_index", 0, sort_index=pid))
        self._threads: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        for place, thread in enumerate(threads, 1):
            self._threads[thread] = place
            self.events.append(self._named("thread_name", place, name=thread))
            self.events.append(self._named("thread_sort_index", place, sort_index=place))

    def slice(
        self,
        thread: str,
        name: str,
        begin_seconds: float,
        end_seconds: float,
        *,
        category: str,
        args: Mapping[str, Any] | None = None,
        colour: str | None = None,
    ) -> None:
        """Add a bar to `thread`.

        Bars of one thread follow one another or are nested.
        """
        begin, end = _nanoseconds(begin_seconds), _nanoseconds(end_seconds)
        event = self._event("X", name, begin, tid=self._threads[thread], cat=category, dur=(end - begin) / 1000)
        if args:
            event["args"] = dict(args)
        if colour:
            event["cname"] = colour

    def flow(self, number: int, name: str, source: tuple[str, float], target: tuple[str, float]) -> None:
        """Add an arrow between the slices at two threads and times.

        Each arrow has a `number` of its own.
        """
        for phase, (thread, seconds), more in (("s", source, {}), ("f", target, {"bp": "e"})):
            self._event(
                phase, name, _nanoseconds(seconds), tid=self._threads[thread], cat="flow", id=f"{self.pid}.{number}",
                **more
            )  # fmt: skip

    def count(self, name: str, seconds: float, value: int) -> None:
        """Set the counter `name` to `value` from `seconds` on."""
        if self._counted.get(name) != value:
            self._counted[name] = value
            self._event("C", name, _nanoseconds(seconds), tid=0, args={"bytes": value})

    def _event(self, phase: str, name: str, at: int, **more: Any) -> dict[str, Any]:
        event = {"ph": phase, "name": name, "pid": self.pid, "ts": at / 1000, **more}
        self.events.append(event)
        return event

    def _named(self, what: str, tid: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": self.pid, "tid": tid, "args": args}


def write_trace_events(path: str | Path, processes: Iterable[Process], facts: Mapping[str, Any]) -> None:
    """Write `processes` to `path`, with `facts` about all of them. Raises RequestError if that fails."""
    content = {
        "displayTimeUnit": "ms",
        "otherData": {key: str(value) for key, value in facts.items()},
        "traceEvents": [event for process in processes for event in process.events],
    }
    write_whole(path, json.dumps(content, separators=(",", ":")))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
