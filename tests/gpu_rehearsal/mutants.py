"""Defects planted in the log of a correct run: what the runtime would have done without one of its waits.

The stand-in does all work at once, so a wait that is left out changes nothing but the log: the log of the defective
runtime is the correct one without that row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from stand_in import KINDS

Log = NDArray[np.void]
COPY, RECORD, WAIT = (KINDS.index(kind) for kind in ("copy", "record", "wait"))
OUT, IN = 1, 2
"""Labels of copies from and to a device."""


def lane(log: Log, direction: int) -> int:
    """The stream that carries the transfers of a direction: of all others than the legacy one, that with most copies."""
    copies = log[(log["kind"] == COPY) & (log["label"] == direction) & (log["stream"] > 1)]
    streams, counts = np.unique(copies["stream"], return_counts=True)
    assert len(streams), "nothing was transferred"
    return int(streams[counts.argmax()])


def waits(log: Log, waiting: int, awaited: int) -> list[int]:
    """Rows in which the stream `waiting` waits for an event that `awaited` had recorded."""
    recorded_by: dict[int, int] = {}
    rows = []
    for row, (kind, _, stream, first, _, _) in enumerate(log.tolist()):
        if kind == RECORD:
            recorded_by[first] = stream
        elif kind == WAIT and stream == waiting and recorded_by.get(first) == awaited:
            rows.append(row)
    return rows


def without(log: Log, rows: list[int]) -> Log:
    return np.delete(log, rows)


def each_wait_once(log: Log, waiting: int, awaited: int, most: int) -> Iterator[Log]:
    """The log without one of these waits, for at most so many of them, spread over the log."""
    rows = waits(log, waiting, awaited)
    for row in rows[:: max(1, len(rows) // most)][:most]:
        yield without(log, [row])


def _no_await_offload(log: Log, compute: int) -> Log:
    return without(log, waits(log, compute, lane(log, OUT)))


def _no_await_prefetch(log: Log, compute: int) -> Log:
    return without(log, waits(log, compute, lane(log, IN)))


def _offload_before_its_producer(log: Log, compute: int) -> Log:
    return without(log, waits(log, lane(log, OUT), compute))


def _prefetch_before_memory_is_free(log: Log, compute: int) -> Log:
    return without(log, waits(log, lane(log, IN), compute))


def _recorded_too_early(log: Log, direction: int) -> Log:
    """Each event of the lane is recorded before the copy that it stands for."""
    carrier, found, copy = lane(log, direction), log.copy(), None
    for row in range(len(found)):
        if found["stream"][row] != carrier:
            continue
        if found["kind"][row] == COPY:
            copy = row
        elif found["kind"][row] == RECORD and copy is not None:
            found[[copy, row]] = found[[row, copy]]
            copy = None
    return found


def _slot_reused_too_early(log: Log, compute: int) -> Log:
    """An offload that comes while a prefetch is under way goes to the place that is still being read."""
    found, out, inward = log.copy(), lane(log, OUT), lane(log, IN)
    under_way: list[int] = []  # rows of prefetches that compute has not waited for
    covered: dict[int, int] = {}  # by event: the last row of the inward lane before it
    last = -1
    for row, (kind, label, stream, first, _, _) in enumerate(log.tolist()):
        if kind == COPY and stream == inward and label == IN:
            under_way.append(row)
            last = row
        elif kind == RECORD and stream == inward:
            covered[first] = last
        elif kind == WAIT and stream == compute:
            under_way = [copy for copy in under_way if copy > covered.get(first, -1)]
        elif kind == COPY and stream == out and under_way:
            found["first"][row] = found["second"][under_way[-1]]
    return found


MUTANTS: dict[str, Callable[[Log, int], Log]] = {
    "await_offload does not wait": _no_await_offload,
    "await_prefetch does not wait": _no_await_prefetch,
    "the outward lane does not wait for compute": _offload_before_its_producer,
    "the inward lane does not wait for compute": _prefetch_before_memory_is_free,
    "an offload's event is recorded before its copy": lambda log, _: _recorded_too_early(log, OUT),
    "a prefetch's event is recorded before its copy": lambda log, _: _recorded_too_early(log, IN),
    "a slot is given out again before its last reader is done": _slot_reused_too_early,
}
