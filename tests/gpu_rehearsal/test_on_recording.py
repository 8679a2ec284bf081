"""A recording on the CUDA path: the same calls in the same order without a race, events beside them, and nobody waits in a step."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import stand_in
import torch
from tests.gpu_rehearsal.jobs import DOORS, Job, job
from tests.gpu_rehearsal.races import find_races
from tests.gpu_rehearsal.touching import Touching
from tests.report.tracing.format import counted, of_process, read_trace

import overspill
from overspill.core import Verb
from overspill.errors import RequestError
from overspill.placement.snapshot import read_snapshot, replay_snapshot
from overspill.report.tracing.plan_trace import LIVE
from overspill.report.tracing.run_trace import MEASURED

STEPS = 3
JOB = ("gpt2", 8, "smallest")


def logged(it: Job) -> Any:
    """What the driver was asked for in some steps."""
    stand_in.take_log()
    stand_in.log(True)
    for _ in range(STEPS):
        it.step()
    stand_in.log(False)
    return stand_in.take_log()


@pytest.mark.parametrize("door", DOORS)
def test_what_is_recorded_is_what_runs_without_it_and_no_copy_races(door: str) -> None:
    with job(door, *JOB, small=True, policy="lms", tracker=Touching()) as it:
        it.step()
        it.step()
        plain = logged(it)
        with overspill.record(it.source, steps=STEPS + 1):
            it.step()  # in which graphs are made to tell
            recorded = logged(it)
        again = logged(it)
        assert it.plan().offloaded_bytes > 0

    def kinds(log: Any) -> Counter[str]:
        found = Counter(stand_in.KINDS[kind] for kind in log["kind"].tolist())
        return Counter({kind: found[kind] for kind in ("launch", "copy", "set", "access")})

    assert kinds(recorded) == kinds(plain) == kinds(again)
    assert find_races(recorded).races == []


@pytest.mark.parametrize("door", DOORS)
def test_the_host_waits_for_nothing_in_a_recorded_step(door: str, record: Any) -> None:
    with job(door, *JOB, small=True, policy="lms") as it:
        for _ in range(3):
            it.step()
        plain = measured(it)
        with overspill.record(it.source, steps=100, snapshot=False) as recording:
            it.step()
            found = measured(it)
        after = measured(it)
        instructions = len(recording.record.within(recording.record.host, 1))
        swaps = it.plan().schedule.counts[Verb.OFFLOAD] + it.plan().schedule.counts[Verb.PREFETCH]
    assert found["syncs"] == found["event_syncs"] == 0
    assert (found["launches"], found["copies"]) == (plain["launches"], plain["copies"])
    assert found["events"] <= swaps, "those with a time are used again"
    assert 0 < found["records"] - plain["records"] <= 2 * instructions + 3 * swaps + 2
    assert after["records"] == plain["records"], "it costs nothing once it is over"
    record.rows("recording").append({"door": door, "instructions": instructions, "plain": plain, "recorded": found})


def measured(it: Job) -> dict[str, Any]:
    """What the driver is asked for in a step, and the processor time of the host."""
    seconds, before, syncs = [], stand_in.counts(), stand_in.event_syncs()
    for _ in range(9):
        begun = time.process_time()
        it.step()
        seconds.append(time.process_time() - begun)
    counts = stand_in.counts().since(before)._asdict()
    found = {key: counts[key] / 9 for key in ("launches", "copies", "waits", "records", "events", "syncs")}
    return found | {"event_syncs": stand_in.event_syncs() - syncs, "host_ms_median": median(seconds) * 1e3}


@pytest.mark.parametrize("door", DOORS)
def test_the_files_of_a_recording_are_in_order(door: str, tmp_path: Path) -> None:
    with job(door, *JOB, small=True, policy="lms") as it:
        it.step()
        it.step()
        with overspill.record(it.source, steps=STEPS) as recording:
            for _ in range(STEPS + 1):
                it.step()
        plan = it.plan()
    record = recording.record
    assert len(record.steps) == STEPS
    for verb, copies in record.copies.items():
        assert sum(copy.label is not None for copy in copies) == STEPS * plan.schedule.counts[verb]
    assert all(
        a.end_seconds <= b.begin_seconds + 1e-6 for a, b in zip(record.compute, record.compute[1:], strict=False)
    )
    recording.trace(tmp_path / "run.json")
    measured_events = of_process(read_trace(tmp_path / "run.json"), MEASURED)
    assert sum(e.get("cat") == "issue" for e in measured_events) == len(record.host)
    assert max(counted(measured_events, LIVE)) == recording.peak_bytes <= plan.peak_bytes
    recording.report(tmp_path / "run.html")
    recording.snapshot(tmp_path / "run.pickle")
    snapshot = record.device_snapshot
    assert snapshot is not None
    assert replay_snapshot(read_snapshot(tmp_path / "run.pickle")).segment_events_equal
    said = {entry["user_metadata"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"}
    assert {text.rpartition(" | ")[2] for text in said} >= {"prefetch", "run, forward", "run, backward"}
    steps = [a["name"] for a in snapshot["external_annotations"] if a["name"].startswith("step ")]
    assert steps == [f"step {number}" for number in range(1, STEPS + 1) for _ in range(2)]
    assert not torch._C._cuda_isHistoryEnabled()


def test_a_snapshot_that_nobody_asked_for_is_not_made(tmp_path: Path) -> None:
    with job("train_step", *JOB, small=True) as it:
        with overspill.record(it.source, snapshot=False) as recording:
            it.step()
        with pytest.raises(RequestError, match="record with snapshot=True"):
            recording.snapshot(tmp_path / "run.pickle")
