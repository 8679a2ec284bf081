"""A second device, a card that is too small, a driver that refuses, a kernel that fails, an end in the middle of things."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.gpu_rehearsal.processes import found_on_card, on_card


@pytest.fixture
def trouble(record: Any) -> Any:
    def told(what: str, **variables: int) -> dict[str, Any]:
        found = found_on_card("trouble", what, **({"card_bytes": 8 << 30, "copy_limit": 1 << 30} | variables))
        record.rows("trouble").append({"what": what} | found)
        return found

    return told


def test_both_doors_work_on_a_second_device_and_take_nothing_of_the_first(trouble: Any) -> None:
    found = trouble("second_device", devices=2)
    assert all(found["offloaded_bytes"])
    assert found["first_device_bytes"] == 0
    assert found["round_trip"]


def test_out_of_memory_is_pytorch_s_error(trouble: Any) -> None:
    found = trouble("out_of_memory")
    assert found["torch"]
    assert found["recognised"]


def test_refused_registration_is_one_line_and_harms_nothing_after(trouble: Any) -> None:
    found = trouble("refused_registration")
    assert found["error"] == "StoreError"
    assert "ulimit -l" in found["said"]
    assert found["next_step"]


def test_a_failed_kernel_is_told_and_the_process_ends_with_a_line_and_no_traceback(record: Any) -> None:
    done = on_card("trouble", "sticky_error", card_bytes=8 << 30, copy_limit=1 << 30)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    record.rows("trouble").append({"what": "sticky_error"} | found | {"said_at_exit": done.stderr})
    assert "illegal memory access" in found["said"]
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if "a train step was dropped" in line]) == 1


def test_a_dropped_step_gives_its_pinned_memory_back(trouble: Any) -> None:
    found = trouble("dropped_step")
    assert found["pinned_bytes"][0] == found["pinned_bytes"][-1] > 0
    assert found["left_bytes"] == 0


def test_a_process_ends_in_order_while_everything_lives(record: Any) -> None:
    done = on_card("trouble", "exit_with_live_blocks", card_bytes=8 << 30)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["live_bytes"] > 0
    record.rows("trouble").append({"what": "exit_with_live_blocks", "said_at_exit": done.stderr})
    assert not [line for line in done.stderr.splitlines() if "nanobind" in line or "stand-in GPU" in line]
