"""No copy races with a kernel or another copy, in every policy and through both doors; and the check sees each wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import stand_in
import torch
from tests.gpu_rehearsal.jobs import DOORS, job
from tests.gpu_rehearsal.mutants import IN, MUTANTS, OUT, each_wait_once, lane, waits
from tests.gpu_rehearsal.races import find_races
from tests.gpu_rehearsal.touching import Touching

COMPUTE = 1
"""The legacy stream of the first device, on which PyTorch computes."""
POLICIES = ("auto", "auto:update=host", "dymem", "lms", "sequential", "vdnn-all", "vdnn-dynamic", "window")
JOB = ("gpt2", 8, "smallest")
SWAPS = "lms"
"""The policy that transfers most, which waits are left out of."""
SINGLE_WAITS = 40
"""How many waits of each kind are left out one at a time."""


def logged(policy: str, door: str) -> tuple[Any, Touching, Any]:
    """The log of three steps, within the smallest budget that the policy can keep."""
    touching = Touching()
    optimizer = "adamw" if door == "train_step" else "momentum"
    with job(door, *JOB, optimizer=optimizer, small=True, policy=policy, tracker=touching) as it:
        it.step()
        stand_in.take_log()
        stand_in.log(True)
        for _ in range(3):
            it.step()
        stand_in.log(False)
        return stand_in.take_log(), touching, it.plan()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_races(policy: str, door: str, record: Any) -> None:
    log, touching, plan = logged(policy, door)
    found = find_races(log)
    kinds = Counter(stand_in.KINDS[kind] for kind in log["kind"].tolist())
    record.rows("races").append(
        {
            "policy": policy, "door": door, "offloaded_bytes": plan.offloaded_bytes,
            "launches": kinds["launch"], "copies": kinds["copy"], "waits": kinds["wait"],
            "accesses": found.accesses, "launches_of_no_op": unclaimed_launches(log), "races": len(found.races),
        }
    )  # fmt: skip
    assert found.races == [], [(told(log[a], touching), told(log[b], touching)) for a, b in found.races[:5]]
    assert not plan.offloaded_bytes or kinds["wait"], "nothing was transferred, so nothing was tried"


def told(row: Any, touching: Touching) -> str:
    kind = stand_in.KINDS[row["kind"]]
    what = touching.names[row["label"]] if kind == "access" else kind
    return f"{what} on {row['stream']} at {row['first']:#x}, {row['second']:#x}, {row['nbytes']}"


def unclaimed_launches(log: Any) -> int:
    """Launches after which no op says what it touched before its stream goes on to wait, record or copy."""
    access, launch = stand_in.KINDS.index("access"), stand_in.KINDS.index("launch")
    compute = log[log["stream"] == COMPUTE]["kind"]
    left = pending = 0
    for kind in compute.tolist():
        if kind == launch:
            pending += 1
        elif kind == access:
            pending = 0
        else:
            left, pending = left + pending, 0
    return left + pending


@pytest.fixture(scope="module")
def logs() -> list[Any]:
    # By `window`, tensors leave while others come back.
    return [logged(*run)[0] for run in ((SWAPS, "compile"), (SWAPS, "train_step"), ("window", "train_step"))]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_kind_of_wait_is_missed(mutant: str, logs: list[Any], record: Any) -> None:
    races = [len(find_races(MUTANTS[mutant](log, COMPUTE)).races) for log in logs]
    record.rows("mutants").append({"mutant": mutant, "races": sum(races)})
    assert sum(races) > 0


def test_single_waits_are_missed(logs: list[Any], record: Any) -> None:
    all_noticed: list[bool] = []
    for log in logs:
        out, inward = lane(log, OUT), lane(log, IN)
        for name, waiting, awaited in (
            ("await_offload", COMPUTE, out), ("await_prefetch", COMPUTE, inward),
            ("outward lane", out, COMPUTE), ("inward lane", inward, COMPUTE),
        ):  # fmt: skip
            noticed = [bool(find_races(one).races) for one in each_wait_once(log, waiting, awaited, SINGLE_WAITS)]
            record.rows("single_waits").append(
                {
                    "wait": name,
                    "waits": len(waits(log, waiting, awaited)),
                    "left_out": len(noticed),
                    "noticed": sum(noticed),
                }
            )
            assert any(noticed), name
            all_noticed += noticed
    assert np.mean(all_noticed) > 0.2  # the others only repeat what another wait ensures


@pytest.mark.parametrize("door", DOORS)
def test_no_races_on_the_streams_of_a_user(door: str, record: Any) -> None:
    """Steps in turn on two streams, each of which waits for the step before."""
    touching = Touching()
    optimizer = "adamw" if door == "train_step" else "momentum"
    with job(door, *JOB, optimizer=optimizer, small=True, policy=SWAPS, tracker=touching) as it:
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        stand_in.take_log()
        stand_in.log(True)
        for i in range(4):
            with torch.cuda.stream(streams[i % 2]):
                it.step()
            streams[(i + 1) % 2].wait_stream(streams[i % 2])
        stand_in.log(False)
        assert it.plan().offloaded_bytes > 0
    log = stand_in.take_log()
    found = find_races(log)
    assert {stream.cuda_stream for stream in streams} <= set(log["stream"].tolist())
    record.rows("races_on_streams_of_a_user").append(
        {"door": door, "accesses": found.accesses, "races": len(found.races)}
    )
    assert not found.races
